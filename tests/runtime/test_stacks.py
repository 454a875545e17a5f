"""One array of the caller's is several blocks of the plan, and only shards change hands."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from multimesh._src.ir.plan import Block, Input
from multimesh._src.jax_compat.copies import shards
from multimesh._src.runtime import counters
from multimesh._src.runtime.compiled_plan import CompiledPlan, compile_plan
from tests.runtime.plans import P, PlanBuilder, submesh

IN_PLACE = P("stage", "data")
ROWS = np.arange(32, dtype=np.float32).reshape(4, 8)
DEVICES = [(0, 1), (2, 3)]


def whole_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("stage", "data"), axis_types=(kind, kind))


def make_step(*, donated: bool = False, returns_argument: bool = False) -> CompiledPlan:
    """(batch, stack) -> (batch + 1, 2 stack), the stack in one block per stage."""
    builder = PlanBuilder()
    places = [submesh(number, devices) for number, devices in enumerate(DEVICES)]
    blocks = [Block(1, number, 2, whole_mesh(), "stage") for number in range(2)]
    batch = builder.argument("batch", (8,), places[0])
    slots = [builder.slot((2, 8), place, P(None, "data")) for place in places]
    builder.inputs += [
        Input(1 + k, 1, f"w[{2 * k}:{2 * k + 2}]", (slot,), donated, block=block)
        for k, (slot, block) in enumerate(zip(slots, blocks, strict=True))
    ]
    (first,) = builder.task("add", lambda x: (x + 1,), places[0], [batch])
    outputs = slots
    if not returns_argument:
        outputs = [
            builder.task("double", lambda x: (2 * x,), place, [slot], [P(None, "data")])[0]
            for place, slot in zip(places, slots, strict=True)
        ]
    plan = builder.plan(first, *outputs)
    return compile_plan(replace(plan, output_blocks=(None, *blocks)))


def placed(kind: AxisType = AxisType.Auto, spec: Any = None) -> jax.Array:
    spec = P("stage", "data") if spec is None else spec
    return jax.device_put(ROWS, NamedSharding(whole_mesh(kind), spec))


def pointers(array: jax.Array) -> list[int]:
    return [shard.unsafe_buffer_pointer() for shard in shards(array)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_array_in_place_is_taken_apart_and_put_together(kind: AxisType) -> None:
    step, batch = make_step(), np.zeros(8, np.float32)
    for _ in range(2):
        before = counters.snapshot()
        first, doubled = step.call([batch, placed(kind)])
        assert counters.since(before).argument_moves == 0
        np.testing.assert_array_equal(first, batch + 1)
        np.testing.assert_array_equal(doubled, 2 * ROWS)
        assert doubled.sharding == NamedSharding(whole_mesh(), P("stage", "data"))
        doubled.block_until_ready()


@pytest.mark.parametrize("place", ["host", "one device", "replicated", "one stage"])
def test_an_array_elsewhere_is_moved(place: str) -> None:
    mesh = Mesh(np.array(jax.devices()[6:8]), ("data",))
    value = {
        "host": ROWS,
        "one device": jax.device_put(ROWS, jax.devices()[7]),
        "replicated": placed(spec=P()),
        "one stage": jax.device_put(ROWS, NamedSharding(mesh, P("data"))),
    }[place]
    before = counters.snapshot()
    _, doubled = make_step().call([np.zeros(8, np.float32), value])
    moved = counters.since(before)
    assert (moved.argument_moves, moved.argument_puts) == ((0, 2) if place == "host" else (1, 1))
    np.testing.assert_array_equal(doubled, 2 * ROWS)


def test_a_donated_stack_is_updated_in_place() -> None:
    value = placed()
    held = pointers(value)
    _, doubled = make_step(donated=True).call([np.zeros(8, np.float32), value])
    assert pointers(doubled) == held
    assert value.is_deleted()


def test_an_undonated_stack_stays() -> None:
    value = placed()
    _, doubled = make_step().call([np.zeros(8, np.float32), value])
    doubled.delete()
    np.testing.assert_array_equal(value, ROWS)


@pytest.mark.parametrize("donated", [False, True])
def test_a_stack_that_is_returned_is_the_callers_array(donated: bool) -> None:
    value = placed()
    step = make_step(donated=donated, returns_argument=True)
    _, same = step.call([np.zeros(8, np.float32), value])
    assert same is value and not value.is_deleted()


def test_shardings_are_those_of_whole_arrays() -> None:
    step = make_step()
    whole = NamedSharding(whole_mesh(), P("stage", "data"))
    assert step.input_shardings[1] == step.output_shardings[1] == whole
    assert len(step.input_shardings) == len(step.output_shardings) == 2
