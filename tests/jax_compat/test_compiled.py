"""Calling compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.jax_compat import compiled
from multimesh._src.jax_compat.compiled import (
    flat_call,
    layout_getter,
    local_settings,
    watched_call,
)


def _program(function: Any, *args: Any) -> tuple[Any, list[Any]]:
    program = jax.jit(function, keep_unused=True).lower(*args).compile()
    return program, [arg.dtype for arg in args]


def test_plain_programs_are_called_directly() -> None:
    x = jnp.arange(4.0)
    program, dtypes = _program(lambda x, y: [x + 1], x, x)
    call = flat_call(program, dtypes)
    assert call.__qualname__.startswith("_direct_call")
    (result,) = call((x, x))
    np.testing.assert_array_equal(result, x + 1)
    assert result.sharding == program.output_shardings[0]


def test_a_watched_call_says_when_the_program_has_run() -> None:
    x = jnp.arange(4.0)
    program = jax.jit(lambda x: [x + 1], donate_argnums=0).lower(x).compile()
    call = watched_call(program, [x.dtype])
    assert call is not None
    waits, made = [], [x]
    for _ in range(3):
        made, wait = call(made)  # each takes over the results of the one before
        waits.append(wait)
    assert x.is_deleted()
    for wait in waits:
        wait()
    np.testing.assert_array_equal(made[0], np.arange(4.0) + 3)


def test_a_watched_call_with_keys() -> None:
    key = jax.random.key(3)
    program, dtypes = _program(lambda key: [jax.random.split(key)], key)
    call = watched_call(program, dtypes)
    assert call is not None
    (keys,), wait = call((key,))
    wait()
    assert jnp.array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(key)))


def test_no_token_no_watched_call(monkeypatch: pytest.MonkeyPatch) -> None:
    program, dtypes = _program(lambda x: [x + 1], jnp.float32(1))
    monkeypatch.setattr(compiled.private, "ALLOWED", False)
    assert watched_call(program, dtypes) is None

    def function(x: jax.Array) -> list[jax.Array]:
        jax.debug.callback(lambda x: None, x)
        return [x]

    monkeypatch.undo()
    assert watched_call(*_program(function, jnp.float32(2))) is None


def test_typed_keys() -> None:
    key = jax.random.key(3)
    program, dtypes = _program(lambda key: [jax.random.fold_in(key, 1)], key)
    call = flat_call(program, dtypes)
    assert call.__qualname__.startswith("_direct_call")
    (result,) = call((key,))
    assert jnp.array_equal(
        jax.random.key_data(result), jax.random.key_data(jax.random.fold_in(key, 1))
    )


def test_effects_go_the_public_way() -> None:
    seen = []

    def function(x: jax.Array) -> list[jax.Array]:
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return [x]

    program, dtypes = _program(function, jnp.float32(2))
    call = flat_call(program, dtypes)
    assert not call.__qualname__.startswith("_direct_call")
    call((jnp.float32(2),))
    jax.effects_barrier()
    assert seen == [2.0]


def test_without_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise AttributeError("xla_executable")

    monkeypatch.setattr(compiled, "_direct_call", missing)
    program, dtypes = _program(lambda x: [x + 1], jnp.float32(1))
    assert flat_call(program, dtypes)((jnp.float32(1),))[0] == 2
    monkeypatch.setattr(compiled, "ArrayImpl", None)
    assert layout_getter()(jnp.float32(1)) is None


def test_equal_layouts_are_one_object() -> None:
    layout_of = layout_getter()
    assert layout_of(jnp.zeros((2, 3))) is layout_of(jnp.ones((2, 3)))


def test_settings_of_the_thread_are_carried_over() -> None:
    import threading

    seen = []
    with jax.default_matmul_precision("float32"):
        apply = local_settings()
    thread = threading.Thread(
        target=lambda: (apply(), seen.append(jax.config.jax_default_matmul_precision))
    )
    thread.start()
    thread.join()
    assert seen == ["float32"]
