"""The garbage collector is held for a while and always comes back."""

import gc

import pytest

from multimesh._src.collector import paused_collector


def test_the_collector_comes_back_after_an_error() -> None:
    @paused_collector()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_nested_pauses_end_with_the_outer_one() -> None:
    with paused_collector():
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_the_user_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
