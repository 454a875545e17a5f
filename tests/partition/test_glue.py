"""Glue that moves in groups, and preparations of a microbatch that are made where they are used."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.partition.assign.glue import settle_glue
from multimesh._src.partition.assign.prepared import clone_preparations
from multimesh._src.partition.split.regions import analyze_flow
from tests.partition.programs import Assigned, assigned, named, zeros
from tests.programs.plainly import layer, pipeline

SQUARE = zeros(8, 8)
LIMIT = 1 << 20


def settled(found: Assigned) -> Assigned:
    flow = analyze_flow(found.flat, found.cloned)
    place = settle_glue(found.flat, flow, found.seeded, found.place, {}, {})
    return replace(found, place=place)


def prepared(found: Assigned, max_cost: int = LIMIT) -> set[str]:
    """The primitives that are cloned because they prepare a microbatch."""
    flow = analyze_flow(found.flat, found.cloned)
    new = clone_preparations(found.flat, flow, found.seeded, found.place, max_cost)
    serials = new.floating - found.cloned.floating
    equations = (eq for name in ("sin", "cos", "exp") for eq in named(found.flat.steps, name))
    return {eq.primitive for eq in equations if eq.serial in serials}


def normalized(params: Any, x: Any) -> Any:
    """One by one, `sin` and `cos` stay with what they read, and two arrays cross."""
    with layer(0):
        x = x @ params[0]
    h = jnp.cos(jnp.sin(x))
    with layer(1):
        return h @ params[1] + jnp.tanh(x)


def test_a_chain_moves_to_its_users_where_its_operand_is_sent_anyway() -> None:
    found = assigned(pipeline(2), normalized, [SQUARE, SQUARE], SQUARE)
    assert found.of("sin") == found.of("dot_general", 0)
    after = settled(found)
    assert after.of("sin") == after.of("cos") == found.of("dot_general", 1)


def test_seeds_and_what_crosses_nowhere_stay() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            a = jnp.sin(x @ params[0])
        with layer(1):
            b = x @ params[1]
        return jnp.cos(a), jnp.exp(b)

    found = assigned(pipeline(2), step, [SQUARE, SQUARE], SQUARE)
    assert settled(found).place == found.place


def test_backward_glue_goes_with_what_it_reads() -> None:
    """A unit vector of what stage 0 made: its backward reads what its forward made there."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            with layer(0):
                a = jnp.tanh(x @ params[0])
            a = a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True))
            with layer(1):
                return jnp.sum(a @ params[1])

        return jax.grad(loss)(params)

    found = settled(assigned(pipeline(2), step, [SQUARE, SQUARE], zeros(64, 8)))
    (glue,) = {found.place[eq.serial] for eq in named(found.flat.steps, "div")}
    assert glue == found.of("tanh")


def test_no_change_makes_a_chain_of_submeshes_longer() -> None:
    """Two rows would cross instead of a matrix, but there and back again."""

    def step(params: Any, x: Any) -> Any:
        with layer(0):
            wide = x @ params[0]
            first = wide[0]
        with layer(1):
            row = first @ params[1]
        mixed = row[:, None] * row[None, :] * jnp.sin(wide)
        small = jnp.max(mixed, axis=0)
        with layer(1):
            return small @ params[1]

    found = assigned(pipeline(2), step, [SQUARE] * 2, SQUARE)
    after = settled(found)
    assert after.of("reduce_max") == after.of("mul", 1) == after.of("dot_general", 1)


def test_terms_of_an_accumulator_stay_where_they_are_made() -> None:
    """Each submesh has an accumulator of its own, so moving the terms would save nothing."""

    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                a = x @ params[0]
            with layer(1):
                b = a @ params[1]
            return total + jnp.sin(a).sum(0) + jnp.cos(b).sum(0), None

        return lax.scan(body, jnp.zeros(8), xs)[0]

    after = settled(assigned(pipeline(2), step, [SQUARE, SQUARE], zeros(4, 8, 8)))
    assert (after.of("sin"), after.of("cos")) == (
        after.of("dot_general", 0),
        after.of("dot_general", 1),
    )


# --- preparations ---------------------------------------------------------------------------------


def towers(params: Any, xs: Any) -> Any:
    def body(total: Any, x: Any) -> Any:
        ready = jnp.sin(x)
        with layer(0):
            a = ready @ params[0]
        with layer(1):
            b = jnp.cos(ready) @ params[1]
        return total + a.sum() + b.sum(), None

    return lax.scan(body, jnp.float32(0), xs)[0]


def test_both_towers_prepare_the_batch() -> None:
    found = assigned(pipeline(2), towers, [SQUARE, SQUARE], zeros(4, 8, 8))
    assert prepared(found) == {"sin"}, "`cos` is part of a tower"
    assert prepared(found, max_cost=10) == set(), "too dear to do twice"


def test_what_is_smaller_than_the_batch_is_sent() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            few = jnp.sin(x[:2])
            with layer(0):
                a = few @ params[0] + x[:2]
            with layer(1):
                b = few @ params[1]
            return total + a.sum() + b.sum(), None

        return lax.scan(body, jnp.float32(0), xs)[0]

    assert prepared(assigned(pipeline(2), step, [SQUARE, SQUARE], zeros(4, 8, 8))) == set()


def test_what_depends_on_parameters_is_no_preparation() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            ready = jnp.sin(x @ params[2])
            with layer(0):
                a = ready @ params[0]
            with layer(1):
                b = ready @ params[1]
            return total + a.sum() + b.sum(), None

        return lax.scan(body, jnp.float32(0), xs)[0]

    assert prepared(assigned(pipeline(2), step, [SQUARE] * 3, zeros(4, 8, 8))) == set()


def test_what_is_made_of_a_moved_array_moves_with_it() -> None:
    """A loss between two submeshes is on one of them, with its sum over the microbatches."""

    def step(params: Any, xs: Any) -> Any:
        def loss(param: Any, x: Any) -> Any:
            with layer(0):
                teacher = jnp.tanh(x @ params[0])
            with layer(1):
                student = jnp.tanh(x @ param)
            return jnp.mean((student - lax.stop_gradient(teacher)) ** 2)

        return microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params[1], xs)

    found = settled(assigned(pipeline(2), step, [SQUARE, SQUARE], SQUARE))
    (square,), (total,) = (named(found.flat.steps, name) for name in ("integer_pow", "reduce_sum"))
    sums = [eq for eq in named(found.flat.steps, "add") if not found.flat.avals[eq.outputs[0]].ndim]
    places = {found.place[eq.serial] for eq in (square, total, *sums)}
    assert places == {found.of("dot_general", 1)}
