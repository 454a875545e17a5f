"""Light equations: what they read crosses instead of what they make."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.plan import Copy
from multimesh._src.partition.pipeline import Partitioned
from tests.partition.programs import assigned, cut, named, zeros
from tests.programs.plainly import check, layer, normal, pipeline, weights

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
