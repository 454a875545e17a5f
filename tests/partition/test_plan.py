"""Homes of arguments, order of runs, carried values, and copies where places differ."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.plan import Copy, Plan, Run
from multimesh._src.ir.program import EVERYWHERE, Program
from tests.partition.programs import cut, zeros
from tests.programs.plainly import layer, mlp, pipeline, square_loss

SQUARE = zeros(8, 8)
PAIR = [SQUARE, SQUARE]


def runs(plan: Plan) -> list[str]:
    return [f"{s.task}[{s.iteration}]" for s in plan.steps if isinstance(s, Run)]


def copies(plan: Plan) -> list[Copy]:
    return [step for step in plan.steps if isinstance(step, Copy)]


def check_plan(plan: Plan) -> None:
    """Every slot is filled once, before it is read, and copies keep the type."""
    filled = [slot for source in plan.inputs for slot in source.slots]
    filled += [constant.slot for constant in plan.constants]
    for step in plan.steps:
        reads = step.inputs if isinstance(step, Run) else step.sources
        assert set(reads) <= set(filled)
        filled += step.outputs if isinstance(step, Run) else step.targets
        if isinstance(step, Copy):
            for source, target in zip(step.sources, step.targets, strict=True):
                a, b = plan.slots[source], plan.slots[target]
                assert (a.aval.shape, a.aval.dtype) == (b.aval.shape, b.aval.dtype)
                assert a.sharding != b.sharding
        else:
            executable = plan.executables[step.executable]
            for slot, spec in zip(step.inputs, executable.in_specs, strict=True):
                assert plan.slots[slot].sharding == NamedSharding(executable.submesh.mesh, spec)
    assert set(plan.outputs) <= set(filled)
    assert len(filled) == len(set(filled)) == len(plan.slots)


# --- homes ---------------------------------------------------------------------------------------


def home_of(program: Program, argument: int) -> str:
    home = program.home.get(program.arguments[argument])
    if home is None:
        return "nowhere"
    return "everywhere" if home == EVERYWHERE else program.submeshes[home].label


def test_an_argument_lives_where_it_is_used_most() -> None:
    def step(table: Any, w: Any, xs: Any) -> Any:
        with layer(0):
            first = table.sum()

        def body(total: Any, x: Any) -> Any:
            with layer(1):
                x = x @ table
            with layer(0):
                return total + (x @ w).sum(), None

        return lax.scan(body, first, xs)[0]

    made, _ = cut(pipeline(2), step, SQUARE, SQUARE, zeros(4, 8, 8))
    assert [home_of(made.program, n) for n in (0, 1)] == ["stage=1", "stage=0"]


@pytest.mark.parametrize(("used", "home"), [(True, "stage=0"), (False, "stage=1")])
def test_a_placed_argument_stays_if_that_submesh_uses_it(used: bool, home: str) -> None:
    multi = pipeline(2)
    place = NamedSharding(multi.slice(stage=0), P())
    placed = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=place)

    def step(table: Any, x: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                x = x @ table if used else jnp.sin(x)
            with layer(1):
                return total + (x @ table @ table).sum(), None

        return lax.scan(body, jnp.float32(0), x)[0]

    made, _ = cut(multi, step, placed, zeros(4, 8, 8))
    assert home_of(made.program, 0) == home


def test_scalars_and_small_shared_arrays_live_everywhere() -> None:
    def step(params: Any, rate: Any, row: Any, own: Any, unused: Any) -> Any:
        with layer(0):
            x = params[0] * rate + row
        with layer(1):
            return x @ params[1] * rate + row + own, unused

    args = (PAIR, zeros(), zeros(8), zeros(8, dtype="bfloat16"), zeros(40))
    made, _ = cut(pipeline(2), step, *args)
    homes = [home_of(made.program, n) for n in range(6)]
    assert homes == ["stage=0", "stage=1", "everywhere", "everywhere", "stage=1", "nowhere"]


# --- copies --------------------------------------------------------------------------------------


def test_all_values_of_one_edge_go_in_one_copy_right_after_they_are_made() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            a, b = x @ params[0], jnp.sin(x) @ params[0]
        with layer(1):
            return a @ params[1], jnp.cos(b)

    made, _ = cut(pipeline(2), step, PAIR, SQUARE)
    check_plan(made.plan)
    assert [type(step).__name__ for step in made.plan.steps] == ["Run", "Copy", "Run"]
    (copy,) = copies(made.plan)
    assert len(copy.sources) == 2
    assert copy.edge == "stage=0 -> stage=1"


def test_a_value_is_copied_once_to_each_submesh() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            h = x @ params[0]
        outs = []
        for index in (1, 2, 4, 5):
            with layer(index):
                outs.append(h @ params[index % 3])
        return outs

    made, _ = cut(pipeline(3), step, [SQUARE] * 3, SQUARE)
    check_plan(made.plan)
    assert [copy.edge for copy in copies(made.plan)] == [
        "stage=0 -> stage=1",
        "stage=0 -> stage=2",
    ]


def test_an_argument_is_copied_once_a_step_not_once_an_iteration() -> None:
    def step(table: Any, w: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                x = x @ table
            with layer(1):
                return total + (x @ w @ table).sum(), None

        return lax.scan(body, jnp.float32(0), xs)[0]

    made, _ = cut(pipeline(2), step, SQUARE, SQUARE, zeros(4, 8, 8))
    check_plan(made.plan)
    (slot,) = made.plan.inputs[0].slots
    assert sum(slot in copy.sources for copy in copies(made.plan)) == 1


def test_results_that_are_arguments_results_and_literals() -> None:
    def step(params: Any, x: Any, unused: Any) -> Any:
        y = mlp(params, x)
        return y, y, params[0], 3.0, y

    made, _ = cut(pipeline(2), step, PAIR, SQUARE, SQUARE)
    check_plan(made.plan)
    outputs = made.plan.outputs
    assert outputs[0] == outputs[1] == outputs[4]
    assert (outputs[2],) == made.plan.inputs[0].slots
    assert outputs[3] in {constant.slot for constant in made.plan.constants}
    assert made.plan.inputs[3].slots == ()


def test_accumulators_that_start_alike_need_no_program_of_their_own() -> None:
    """Two that start from one zero would be one input of the first iteration's program."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y = mlp(params[:2], x)
            with layer(1):
                return jnp.sum(y * params[2])

        return microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, x)

    made, _ = cut(pipeline(2), step, [*PAIR, zeros()], SQUARE)
    last = {s.executable for s in made.plan.steps if isinstance(s, Run) and "layer1" in s.task}
    assert len(last) == 1


def test_a_state_returns_to_where_it_came_from() -> None:
    def step(state: Any, x: Any) -> Any:
        return {"a": state["b"], "b": mlp([state["a"], state["b"]], x)}, x.sum()

    made, _ = cut(pipeline(2), step, {"a": SQUARE, "b": SQUARE}, SQUARE, donate_argnums=0)
    check_plan(made.plan)
    for source, output in zip(made.plan.inputs[:2], made.plan.outputs[:2], strict=True):
        (slot,) = source.slots
        assert made.plan.slots[slot].sharding == made.plan.slots[output].sharding


# --- order ---------------------------------------------------------------------------------------


def train(schedule: str) -> Any:
    def step(params: Any, batch: Any) -> Any:
        grad = jax.value_and_grad(square_loss)
        return microbatch(grad, 0, 2, argnum=1, schedule=schedule)(params, batch)

    return step


ORDERS = {
    "gpipe": ("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"),
    "1f1b": ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
}


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_schedule_orders_the_runs_of_each_submesh(schedule: str) -> None:
    made, _ = cut(pipeline(2), train(schedule), PAIR, (zeros(6, 8), zeros(6, 8)), fuse="never")
    check_plan(made.plan)
    for stage, order in enumerate(ORDERS[schedule]):
        own = [name for name in runs(made.plan) if name.startswith(f"layer{stage}_")]
        names = {"F": f"layer{stage}_fwd", "B": f"layer{stage}_bwd"}
        assert own == [f"{names[action[0]]}[{action[1]}]" for action in order.split()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_accumulators_pass_from_run_to_run(schedule: str) -> None:
    made, _ = cut(pipeline(2), train(schedule), PAIR, (zeros(6, 8), zeros(6, 8)), fuse="never")
    for stage in (0, 1):
        found = [
            step
            for step in made.plan.steps
            if isinstance(step, Run) and step.task == f"layer{stage}_bwd"
        ]
        for before, after in itertools.pairwise(found):
            assert len(set(before.outputs) & set(after.inputs)) == 1
        assert set(found[-1].outputs) & set(made.plan.outputs)


def test_sequential_and_nested_loops_run_iteration_by_iteration() -> None:
    def step(params: Any, x: Any) -> Any:
        def outer(x: Any, _: Any) -> Any:
            x, _ = lax.scan(lambda x, _: (mlp(params, x), None), x, None, length=2)
            with layer(0):
                x = jnp.sin(x)
            return x, x.sum()

        return lax.scan(outer, x, None, length=2)

    made, _ = cut(pipeline(2), step, PAIR, SQUARE)
    check_plan(made.plan)
    inner = ["layer0_fwd[0]", "layer1_fwd[0]", "layer0_fwd[1]", "layer1_fwd[1]"]
    names = runs(made.plan)
    first = names.index("layer0_fwd[0]")
    assert names[first : first + 5] == [*inner, "layer0_fwd[0]"]
    assert names[first + 5 : first + 9] == inner


def test_what_is_carried_over_goes_from_iteration_to_iteration() -> None:
    """Not from run to run: a schedule may run iteration 1 of a reader before its writer."""

    def step(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            now, _ = carry
            y = mlp(params, x)
            return (y, now), None

        return lax.scan(body, (jnp.zeros((8, 8)), jnp.ones((8, 8))), xs)[0]

    made, _ = cut(pipeline(2), step, PAIR, zeros(3, 8, 8))
    check_plan(made.plan)
    made_by = {
        slot: f"{s.task}[{s.iteration}]"
        for s in made.plan.steps
        if isinstance(s, Run)
        for slot in s.outputs
    }
    assert [made_by[slot] for slot in made.plan.outputs] == ["layer1_fwd[2]", "layer1_fwd[1]"]
