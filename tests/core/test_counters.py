"""What a step does not repeat: traces, compiles, moves of state (R8)."""

import functools

import numpy as np
import pytest

from multimesh._src.runtime import counters
from multimesh.jax import mjit
from tests.core import pipelined

pytestmark = pytest.mark.core

BATCH = pipelined.BATCH
NUM_STATE = 13  # four weights with two moments each, and a counter


@pytest.fixture(scope="module", params=[(), (0,)], ids=["kept", "donated"])
def trained(request):
    """A step that has run five times, with the counters of the first and of the other calls."""
    with pipelined.make_multi_mesh():
        step = mjit(pipelined.step, donate_argnums=request.param)
    state = pipelined.make_state()
    before = counters.snapshot()
    state, _ = step(state, BATCH)
    first = counters.since(before)
    before = counters.snapshot()
    for _ in range(4):
        state, _ = step(state, BATCH)
    later = counters.since(before)
    return step.lower(state, BATCH), first, later


def test_five_steps_are_one_trace_and_one_compile_of_each_body(trained):
    lowered, first, later = trained
    assert first.traces == 1
    assert first.lowerings == first.compiles
    assert (later.traces, later.lowerings, later.compiles) == (0, 0, 0)

    compiled = lowered.compile().backend.compiled.executables
    bodies = {task.executable for task in lowered.program.tasks}
    copiers = [name for name in compiled if name.startswith("copy")]
    assert first.compiles == len(compiled) == len(bodies) + len(copiers)
    assert len(copiers) <= 1, "for the first loss of a step, which starts from a constant"


def test_the_state_stays_where_it_is(trained):
    lowered, _, later = trained
    assert later.argument_moves == 0
    assert later.argument_puts == 4 * len(BATCH), "only the batch comes from the host"
    assert [a.moved for a in lowered.program.arguments[:NUM_STATE]] == ["never"] * NUM_STATE


def test_steps_move_what_the_report_says_and_nothing_else(trained):
    lowered, _, later = trained
    assert later.moves == 4 * sum(r.copies for r in lowered.program.reshards if r.bytes)


@pytest.mark.slow
def test_compiles_grow_neither_with_microbatches_nor_with_equal_layers():
    def grown(layers_per_stage: int, num_microbatches: int) -> counters.Counters:
        with pipelined.make_multi_mesh(layers_per_stage=layers_per_stage):
            step = mjit(functools.partial(pipelined.step, num_microbatches=num_microbatches))
        before = counters.snapshot()
        step(pipelined.make_state(2 * layers_per_stage), BATCH)
        return counters.since(before)

    few, many, deep = grown(3, 4), grown(3, 8), grown(5, 4)
    assert few.compiles == many.compiles == deep.compiles
    assert few.lowerings == many.lowerings == deep.lowerings
    assert few.traces == many.traces == deep.traces == 1


def test_a_state_that_lies_elsewhere_is_moved_but_not_traced_again():
    with pipelined.make_multi_mesh():
        step = mjit(pipelined.step)
    state = pipelined.make_state()
    once, _ = step(state, BATCH)
    before = counters.snapshot()
    again, _ = step(state, BATCH)
    grown = counters.since(before)
    assert (grown.traces, grown.compiles) == (0, 0)
    assert grown.argument_moves == NUM_STATE
    for one, other in zip(once[0], again[0], strict=True):
        np.testing.assert_array_equal(one, other)
