"""Lives of buffers, as text."""

import jax.numpy as jnp
import pytest

from multimesh._src.runtime.buffers import plan_buffers
from multimesh._src.runtime.donation import pair_donations
from multimesh._src.runtime.recorder import record
from tests.runtime.plans import P, PlanBuilder, accumulation, submesh


def test_accumulator_in_place() -> None:
    assert record(accumulation(3)).splitlines() == [
        "run  task `forward`, iteration 0 %2 -> %5 free %2",
        "run  task `forward`, iteration 1 %3 -> %6 free %3",
        "run  task `forward`, iteration 2 %4 -> %7 free %4",
        "copy copy `to stage=1` %5 -> %8 free %5",
        "copy copy `to stage=1` %6 -> %9 free %6",
        "copy copy `to stage=1` %7 -> %10 free %7",
        "run  task `add`, iteration 0 %0 %8! %1! -> %11 %12 free %8 %1 %11",
        "run  task `add`, iteration 1 %0 %9! %12! -> %13 %14 free %9 %12 %13",
        "run  task `add`, iteration 2 %0 %10! %14! -> %15 %16 free %10 %14 %15",
        "run  task `update` %0! %16 -> %17 free %0",
        "return %17 %16",
    ]


def test_accumulator_of_the_caller_is_copied_once() -> None:
    lines = record(accumulation(3, donated=False)).splitlines()
    assert lines[6:8] == [
        "run  task `copy of total` %1 -> %18 free %1",
        "run  task `add`, iteration 0 %0 %8! %18! -> %11 %12 free %8 %18 %11",
    ]


def test_no_copy_where_it_does_not_pay() -> None:
    # with two runs the copy would save nothing
    lines = record(accumulation(2, donated=False)).splitlines()
    assert "run  task `add`, iteration 0 %0 %6! %1 -> %8 %9 free %6 %1 %8" in lines
    assert not any("copy of" in line for line in lines)


def _two_results(name: str) -> PlanBuilder:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    x = builder.argument("x", (8,), place, donated=True)
    builder.task(name, lambda x: (x + 1,), place, [x])
    return builder


def test_donated_slot_that_lives_on_is_kept() -> None:
    builder = _two_results("first")
    place = submesh(0, (0, 1))
    (second,) = builder.task("second", lambda x: (x * 2,), place, [0])
    buffered = plan_buffers(builder.plan(second))
    assert buffered.donations == ((), ((0, 0),))
    assert buffered.frees == ((1,), (0,))


def test_argument_that_is_a_result_stays() -> None:
    builder = _two_results("only")
    buffered = plan_buffers(builder.plan(1, 0))
    assert buffered.donations == ((),)
    assert buffered.kept_inputs == {0}
    assert buffered.frees == ((),)
    assert buffered.plan.outputs == (1, 0)


@pytest.mark.parametrize(("other", "donations"), [((2, 3), ((0, 0),)), ((1, 2), ())])
def test_copy_that_may_share_shards(other: tuple[int, ...], donations: object) -> None:
    builder = _two_results("make")
    there = submesh(1, other)
    moved = builder.copy(1, there)
    builder.task("use", lambda x: (x + 1,), submesh(0, (0, 1)), [1])  # while `moved` lives
    buffered = plan_buffers(builder.plan(3, moved))
    assert buffered.donations[1] == donations


def test_same_slot_twice_is_not_donated() -> None:
    builder = _two_results("make")
    (total,) = builder.task("add", lambda x, y: (x + y,), submesh(0, (0, 1)), [1, 1])
    assert plan_buffers(builder.plan(total)).donations[1] == ()


def test_results_do_not_share_with_constants_or_each_other() -> None:
    builder = PlanBuilder()
    here, there = submesh(0, (0, 1)), submesh(1, (1, 2))
    constant = builder.constant(jnp.ones(8), here)
    x = builder.argument("x", (8,), here)
    (y,) = builder.task("make", lambda x: (x + 1,), here, [x])
    moved = builder.copy(y, there)
    assert record(builder.plan(constant, y, moved, x)).splitlines() == [
        "run  task `make` %1 -> %2",
        "copy copy `to stage=1` %2 -> %3",
        "run  task `copy of constant` %0 -> %4",
        "run  task `copy of copy` %3 -> %5 free %3",
        "return %4 %2 %5 %1",
    ]


def test_updates_take_the_buffer_they_update() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    names = ["w", "m", "v"]
    slots = [builder.argument(name, (8,), place, donated=True) for name in names]
    gradient = builder.argument("g", (8,), place)

    def update(w: jnp.ndarray, m: jnp.ndarray, v: jnp.ndarray, g: jnp.ndarray) -> tuple:
        m, v = 0.9 * m + 0.1 * g, 0.9 * v + 0.1 * g * g
        return v, w - m / (jnp.sqrt(v) + 1e-8), m

    builder.task("update", update, place, [*slots, gradient], [P()] * 3)
    plan = builder.plan(4, 5, 6)
    assert plan_buffers(plan).donations == (((0, 1), (1, 2), (2, 0)),)


def test_only_equal_places_share_a_buffer() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    x = builder.argument("x", (8,), place, P("data"), donated=True)
    builder.executable("same", lambda x: (x + 1,), place, [x], [P(("data",))])
    builder.executable("other", lambda x: (x + 1,), place, [x], [P()])
    for number in (0, 1):
        builder.run(number, [x])
    plan = builder.plan(1, 2)
    assert pair_donations(plan, [(0, 0), (1, 0)]) == (((0, 0),), ())
