"""`debug`: real calls are measured, results stay what they are, and passes are shown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import context, debug, mjit, schedules
from multimesh.jax.errors import ConfigError, DebugError
from tests.core import pipelined

NUM_STEPS = 2


@pytest.fixture(scope="module")
def trained():
    """A pipelined step with donated state, the state after one step, and its timeline."""
    with pipelined.make_multi_mesh():
        step = mjit(pipelined.step, donate_argnums=0)
    state, _ = step(pipelined.make_state(), pipelined.BATCH)
    return step, state, debug.measure(step, state, pipelined.BATCH, num_steps=NUM_STEPS)


def kept(tree):
    return jax.tree.map(np.array, tree)


@pytest.mark.core
def test_measured_calls_and_the_arguments_afterwards(trained):
    step, state, timeline = trained
    assert [call.alone for call in timeline.calls] == [True, False] * NUM_STEPS
    assert {call.name for call in timeline.calls} == {"step"}
    kept(state)  # donated ones were copied
    program = step.lower(state, pipelined.BATCH).program
    counts = {task.label: task.num_runs for task in program.tasks}
    measured = {t.info.label: t.num_runs for t in timeline.tasks if not t.info.is_copy}
    assert {label: measured[label] for label in counts} == counts
    kinds = {t.info.label: (t.info.kind, t.info.stage, t.info.submesh) for t in timeline.tasks}
    for task in program.tasks:
        assert kinds[task.label] == (task.kind, task.stage, task.submesh)


@pytest.mark.core
def test_events_agree_with_the_dataflow(trained):
    _, _, timeline = trained
    for call in timeline.calls:
        by_step = {event.step: event for event in call.events}
        free = {}
        for event in call.events:
            assert 0 <= event.begin <= event.enqueued <= call.duration
            assert event.start <= event.end <= call.duration
            for device in event.info.devices:
                assert call.alone or event.start >= min(free.get(device, 0.0), event.end)
                free[device] = event.end
            for needed in event.info.needs:
                assert event.start >= min(by_step[needed].start, event.end)
        forwards = [e for e in call.runs if e.label == "layer0_fwd"]
        assert sorted(e.microbatch for e in forwards) == list(range(pipelined.NUM_MICROBATCHES))


@pytest.mark.core
def test_recorded_steps_give_the_same_bits_and_compile_nothing(trained):
    step, state, _ = trained
    runs = []
    for alone in (None, False, True):
        copied = jax.tree.map(jnp.copy, state)
        if alone is None:
            runs.append(kept(step(copied, pipelined.BATCH)))
            continue
        with debug.counting() as counts, debug.record(alone=alone) as timeline:
            runs.append(kept(step(copied, pipelined.BATCH)))
        assert (counts.traces, counts.compiles) == (0, 0)
        assert counts.copies > 0
        assert len(timeline.calls) == 1 and timeline.call.alone is alone
    for other in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], other)


def test_measured_costs_name_every_action(trained):
    step, state, timeline = trained
    (comparison,) = timeline.comparisons
    simulation = step.lower(state, pipelined.BATCH).schedule
    nodes = {str(node) for node in simulation.graph.nodes}
    for costs in (timeline.costs(), timeline.costs(alone=True)):
        assert nodes <= set(costs.table) and all(cost > 0 for cost in costs.table.values())
    assert sum(seconds for _, seconds in comparison.parts) == pytest.approx(comparison.measured)
    with pipelined.make_multi_mesh(), context(schedule=schedules.auto(costs=timeline.costs())):
        chosen = mjit(pipelined.step).lower(state, pipelined.BATCH).schedule
    assert chosen.schedule.name in schedules.schedule_names()


def test_a_function_that_calls_several_steps(trained):
    step, state, _ = trained
    with pipelined.make_multi_mesh():
        evaluate = mjit(pipelined.loss)

    def train_and_evaluate(state, batch):
        state, loss = step(state, batch)
        return state, loss, evaluate(state[0], batch)

    timeline = debug.measure(train_and_evaluate, state, pipelined.BATCH, num_steps=1, alone=False)
    assert timeline.names == ("step", "loss")
    assert timeline.call.name == "loss", "the last one"
    assert timeline.only("step").comparisons and not timeline.comparisons
    assert "Submeshes" in str(timeline) and "Loop of" in str(timeline.only("step"))


def test_not_a_step_of_ours():
    with pytest.raises(DebugError, match="no step of MultiMesh ran"):
        debug.measure(jax.jit(lambda x: x + 1), jnp.ones(3))


@pytest.mark.parametrize("num_steps", [0, -1, 2.0, True])
def test_number_of_steps(num_steps):
    with pytest.raises(ConfigError, match=r"`measure\(num_steps=.*\)`: it is an integer"):
        debug.measure(jnp.sin, 1.0, num_steps=num_steps)


def test_passes_of_a_function_and_of_what_is_staged():
    params = pipelined.make_params()
    with pipelined.make_multi_mesh():
        found = debug.passes(pipelined.loss, params, pipelined.BATCH)
        lowered = mjit(pipelined.loss).lower(params, pipelined.BATCH)
        assert debug.passes(mjit(pipelined.loss), params, pipelined.BATCH) == found
    passes = ["inline", "simplify_loops", "split_stacks", "assign", "split", "emit", "fuse"]
    assert list(found) == passes
    assert "layer0_fwd" in found["split"] and "copy stage=0 -> stage=1" in found["emit"]
    assert debug.passes(lowered) == debug.passes(lowered.compile()) == found


def test_programs_with_callbacks_are_measured():
    """They give no token: their results are waited for."""
    seen = []

    def loss(params, batch):
        value = pipelined.loss(params, batch)
        with jax.named_scope("layer3"):
            jax.debug.callback(lambda x: seen.append(float(x)), value)
        return value

    with pipelined.make_multi_mesh():
        evaluate = mjit(loss)
    params = pipelined.make_params()
    timeline = debug.measure(evaluate, params, pipelined.BATCH, num_steps=1)
    assert len(seen) == 3 and len({*seen}) == 1
    assert {"layer0_fwd", "layer3_fwd"} <= {event.label for event in timeline.call.runs}
