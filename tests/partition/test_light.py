"""Light equations: what they read crosses instead of what they make."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from multimesh._src.config import context
from multimesh._src.frontend.logical import with_sharding_constraint
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.plan import Copy
from multimesh._src.ir.program import LoopNode, TaskNode
from multimesh._src.partition.pipeline import Partitioned
from multimesh._src.staging.mjit import mjit
from tests.partition.programs import assigned, cut, named, zeros
from tests.programs.plainly import assert_close, check, layer, normal, pipeline, weights

PAIR = [zeros(8, 8), zeros(8, 8)]


def crossing(made: Partitioned) -> list[str]:
    """Types of all values that are copied from stage to stage, in order."""
    plan = made.plan
    return [
        plan.slots[slot].aval.str_short()
        for step in plan.steps
        if isinstance(step, Copy) and "everywhere" not in step.edge
        for slot in step.sources
    ]


def read_by_both(params: Any, batch: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        with layer(0):
            y = jnp.tanh(x @ params[0])
        with layer(1):
            return jnp.sum((y @ params[1] - x) ** 2)

    return microbatch(loss, 0, 2, argnum=1)(params, batch)


def test_a_batch_that_two_stages_read_crosses_once() -> None:
    made, _ = cut(pipeline(2), read_by_both, PAIR, zeros(8, 8))
    assert sorted(crossing(made)) == ["float32[2,8]"] * 4 + ["float32[4,2,8]"]


def test_each_stage_cuts_its_own_microbatches() -> None:
    check(pipeline(2), read_by_both, weights(2), normal(8, 4))


def test_slices_that_are_not_of_each_iteration_are_no_light_ones() -> None:
    def fun(params: Any, x: Any) -> Any:
        def body(total: Any, i: Any) -> Any:
            with layer(0):
                y = jnp.tanh(lax.dynamic_slice_in_dim(x, i, 4) @ params[0])
            with layer(1):
                return total + jnp.sum(y @ params[1]), None

        return lax.scan(body, jnp.float32(0), jnp.arange(4))[0]

    found = assigned(pipeline(2), fun, PAIR, zeros(7, 8), max_cost=0)
    slices = [eq for eq in named(found.flat.steps, "dynamic_slice") if eq.outputs]
    of_x = [eq for eq in slices if found.flat.avals[eq.inputs[0]].shape == (7, 8)]
    assert len(of_x) == 1 and of_x[0].serial not in found.cloned.light


def clipped(params: Any, x: Any) -> Any:
    with layer(0):
        y = jnp.tanh(x @ params[0])
        norm = jnp.sqrt(jnp.sum(y**2))
    small = norm < 1.0
    with layer(1):
        z = y @ params[1]
        return jax.lax.select(small, z, z / norm)


def test_a_number_made_of_one_number_is_made_by_its_users() -> None:
    made, _ = cut(pipeline(2), clipped, PAIR, zeros(4, 8))
    assert sorted(crossing(made)) == ["float32[4,8]", "float32[]"], "and no `bool[]`"
    check(pipeline(2), clipped, weights(2), normal(8, 4))


def test_numbers_in_sums_can_still_be_regrouped() -> None:
    def fun(params: Any, x: Any) -> Any:
        with layer(0):
            y = x @ params[0]
            first = [jnp.sum(y), jnp.max(y)]
        with layer(1):
            z = y @ params[1]
            second = [jnp.sum(z), jnp.max(z)]
        return sum([first[0], second[0], first[1], second[1]]) * z

    made, _ = cut(pipeline(2), fun, PAIR, zeros(4, 8))
    assert sorted(crossing(made)) == ["float32[4,8]", "float32[]"], "one partial sum"
    check(pipeline(2), fun, weights(2), np.ones((8, 4), np.float32))


def unconstrained(params: Any, batch: Any, layout: Callable[[Any], Any] = lambda w: w) -> Any:
    def loss(params: Any, x: Any) -> Any:
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ layout(w))
        return jnp.sum(x**2)

    return microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)


def constrained(params: Any, batch: Any) -> Any:
    return unconstrained(params, batch, lambda w: with_sharding_constraint(w, P("data", None)))


@pytest.mark.parametrize("hoist", [True, False])
def test_each_task_lays_out_a_parameter_for_itself(hoist: bool) -> None:
    """No second copy of the parameters is kept for the loop, or for the backward pass."""
    with context(hoist_loop_invariants=hoist):
        made, _ = cut(pipeline(2, width=2), constrained, PAIR, zeros(8, 8))
    (loop,) = (step for step in made.program.steps if isinstance(step, LoopNode))
    others = [step for step in made.program.steps if isinstance(step, TaskNode)]
    assert not any(set(task.inputs) & set(made.program.arguments) for task in others)
    tasks = [task for task in loop.tasks if isinstance(task, TaskNode)]
    passed = {v for task in tasks for v in task.outputs} & {v for t in tasks for v in t.inputs}
    assert all(made.program.avals[var].shape != (8, 8) for var in passed)
    args = weights(2), normal(8, 4)
    with pipeline(2, width=2):
        ours = mjit(constrained)(*args)
    assert_close(ours, jax.jit(unconstrained)(*args))


def test_a_cast_of_a_constrained_parameter_moves_before_the_loop() -> None:
    def fun(params: Any, batch: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            with layer(0):
                w = with_sharding_constraint(params[0], P("data", None))
                x = x @ w.astype(jnp.bfloat16).astype(jnp.float32)
            with layer(1):
                return jnp.sum(x @ params[1])

        return microbatch(loss, 0, 2, argnum=1)(params, batch)

    _, texts = cut(pipeline(2, width=2), fun, PAIR, zeros(8, 8))
    before, _, inside = texts["simplify_loops"].partition("loop")
    assert "multimesh_constraint" in before and "bfloat16" in before
    assert "multimesh_constraint" not in inside and "bfloat16" not in inside
