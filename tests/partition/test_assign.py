"""Which submesh equations run on: clones, the rules of fewest bytes, sums, saved values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.flat import Lit, Loop
from multimesh._src.partition.assign.saved import use_saved
from multimesh._src.partition.assign.sums import regroup_sums
from multimesh._src.partition.prune import prune
from tests.partition.programs import Assigned, assigned, loops, named, zeros
from tests.programs.plainly import layer, mlp, pipeline

SQUARE = zeros(8, 8)
PAIR = [SQUARE, SQUARE]


# --- clones --------------------------------------------------------------------------------------


def causal(x: Any, ids: Any) -> Any:
    mask = jnp.tril(jnp.ones((8, 8)))
    with layer(0):
        x = x @ mask
    with layer(1):
        return x @ jnp.where(ids[:, None] > 2, mask, 0.0)


def test_what_needs_no_placed_operand_is_cloned() -> None:
    found = assigned(pipeline(2), causal, SQUARE, zeros(8, dtype="int32"))
    floats = {eq.primitive for eq in _equations(found) if eq.serial in found.cloned.floating}
    assert {"iota", "ge", "gt", "select_n"} <= floats
    assert "dot_general" not in floats


def test_dear_equations_are_not_cloned() -> None:
    found = assigned(pipeline(2), causal, SQUARE, zeros(8, dtype="int32"), max_cost=10)
    floats = {eq.primitive for eq in _equations(found) if eq.serial in found.cloned.floating}
    assert "iota" in floats
    assert "select_n" not in floats


def test_large_arguments_and_placed_ones_do_not_float() -> None:
    def step(x: Any, small: Any) -> Any:
        with layer(0):
            return x @ jnp.diag(small + 1)

    def floats(found: Assigned) -> bool:
        return named(found.flat.steps, "add")[0].serial in found.cloned.floating

    assert floats(assigned(pipeline(2), step, SQUARE, zeros(8)))
    assert not floats(assigned(pipeline(2), step, SQUARE, zeros(8), max_elements=4))
    multi = pipeline(2)
    place = NamedSharding(multi.slice(stage=1), P())
    small = jax.ShapeDtypeStruct((8,), np.float32, sharding=place)
    assert not floats(assigned(multi, step, SQUARE, small))


def test_effects_are_never_cloned() -> None:
    def step(x: Any, small: Any) -> Any:
        jax.debug.callback(lambda _: None, small)
        with layer(0):
            return x @ x

    found = assigned(pipeline(2), step, SQUARE, zeros(4))
    (callback,) = named(found.flat.steps, "debug_callback")
    assert callback.serial not in found.cloned


def _equations(found: Assigned) -> list[Any]:
    return [s for s in found.flat.steps if not isinstance(s, Loop)]


# --- places: one rule a test ---------------------------------------------------------------------


def test_an_operand_made_on_a_submesh_keeps_its_user_there() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(1):
            y = x @ params[0]
        return jnp.sin(y)

    assert assigned(pipeline(2), step, PAIR, SQUARE).of("sin") == assigned(
        pipeline(2), step, PAIR, SQUARE
    ).of("dot_general")


def test_the_larger_operand_decides() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            big = x @ params[0]
        with layer(1):
            row = jnp.cos(x[0] @ params[1])
        return big * row[None, :]

    found = assigned(pipeline(2), step, PAIR, zeros(64, 8))
    assert found.of("mul") == found.of("dot_general", 0)
    assert found.of("dot_general", 0) != found.of("cos")


def test_a_smaller_result_crosses_rather_than_a_larger_operand() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            wide = x @ params[0]
        narrow = jnp.max(wide, axis=0)
        with layer(1):
            return narrow @ params[1]

    found = assigned(pipeline(2), step, PAIR, zeros(64, 8))
    assert found.of("reduce_max") == found.of("dot_general", 0)


def test_a_larger_result_is_made_where_its_users_are() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            small = x @ params[0]
        large = jnp.concatenate([small] * 9)
        with layer(1):
            return large @ params[1]

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    assert found.of("concatenate") == found.of("dot_general", 1)


def test_a_clone_that_is_a_result_is_made_where_the_argument_is_that_it_succeeds() -> None:
    """`b` is small: nothing places its update but the layer that reads `b`."""

    def step(state: Any, x: Any) -> Any:
        with layer(1):
            y = x @ state["w"] + state["b"]
        return {"b": jnp.sin(state["b"]), "w": state["w"]}, y

    state = {"b": zeros(8), "w": SQUARE}
    found = assigned(pipeline(2), step, state, SQUARE, donate_argnums=0)
    assert found.seeded and found.of("sin") == found.of("dot_general")


def test_ties_go_to_the_operand_made_last() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            a = x @ params[0]
        with layer(1):
            b = x @ params[1]
        return a * b, b - a

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    assert found.of("mul") == found.of("sub") == found.of("dot_general", 1)


def test_arguments_do_not_vote_beside_a_made_operand() -> None:
    """Tied logits outside every scope do not follow the table to the first stage."""

    def step(table: Any, w: Any, ids: Any) -> Any:
        with layer(0):
            x = jnp.take(table, ids, axis=0)
        with layer(1):
            x = x @ w
        return x @ table.T

    found = assigned(pipeline(2), step, zeros(512, 8), SQUARE, zeros(4, dtype="int32"))
    assert found.of("dot_general", 1) == found.of("dot_general", 0)


def test_scalars_vote_only_when_nothing_else_does() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            a = x @ params[0]
        with layer(1):
            s = jnp.sum(x @ params[1])
        return a * s, jnp.exp(s)

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    assert found.of("mul") == found.of("dot_general", 0)
    assert found.of("exp") == found.of("dot_general", 1)


def test_a_norm_of_parameters_is_taken_where_each_lives() -> None:
    """Who reads a number made of an array has no say on the array."""

    def step(params: Any, x: Any) -> Any:
        norm = sum(jnp.sum(jnp.exp(p)) for p in params)
        grads = jax.grad(lambda p: jnp.tanh(mlp(p, x)).sum())(params)
        return [g * norm for g in grads]

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    exponentials = [found.of("exp", n) for n in (0, 1)]
    assert exponentials == [found.of("reduce_sum", n) for n in (0, 1)] == [0, 1]


def test_numbers_are_joined_where_the_last_one_is_made() -> None:
    """The gradients of the first stage come last, whatever the order of the text."""

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda p, x: jnp.square(jnp.tanh(mlp(p, x))).sum())
        grads = microbatch(gradient, 0, 2, argnum=1)(params, x)
        return [g * jnp.sin(sum(map(jnp.sum, grads))) for g in grads]

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    assert found.of("sin") == 0


def test_an_equation_of_arguments_follows_its_users() -> None:
    def step(params: Any, x: Any) -> Any:
        half = jnp.sin(params[1])
        with layer(0):
            x = x @ params[0]
        with layer(1):
            return x @ half

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    assert found.of("sin") == found.of("dot_general", 1)


def test_optimizer_arithmetic_follows_the_gradient() -> None:
    def step(params: Any, moments: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: mlp(p, x).sum())(params)
        moments = [jnp.maximum(m, g) for m, g in zip(moments, grads, strict=True)]
        return moments, [p - m for p, m in zip(params, moments, strict=True)]

    found = assigned(pipeline(2), step, PAIR, PAIR, SQUARE)
    assert [found.of("max", n) for n in (0, 1)] == [0, 1]


def test_out_shardings_and_placed_arguments_decide() -> None:
    multi = pipeline(2)
    last = NamedSharding(multi.slice(stage=1), P())

    def step(x: Any, y: Any) -> Any:
        return jnp.sin(x), jnp.cos(y)

    placed = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=last)
    found = assigned(multi, step, placed, SQUARE, out_shardings=(None, last))
    assert found.of("sin") == found.of("cos")
    assert found.flat.arguments[0] not in found.cloned.variables


def test_a_carry_lives_where_its_next_value_is_made() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                x = x @ params[0]
            with layer(1):
                y = x @ params[1]
            return total + y, None

        return jnp.sin(lax.scan(body, jnp.zeros((8, 8)) + params[0][0], xs)[0])

    found = assigned(pipeline(2), step, PAIR, zeros(3, 8, 8))
    (loop,) = loops(found.flat.steps)
    dots = [found.place[eq.serial] for eq in named(loop.body, "dot_general")]
    assert dots[0] != dots[1]
    assert found.of("sin") == dots[1]
    init = loop.carries[0].init
    (maker,) = [s for s in found.flat.steps if init in s.outputs]
    assert found.place[maker.serial] == dots[1]


# --- sums ----------------------------------------------------------------------------------------


def regrouped(found: Assigned) -> tuple[Any, dict[int, int]]:
    return regroup_sums(found.flat, found.place, found.seeded, found.cloned)


def test_a_sum_over_submeshes_is_made_within_each_first() -> None:
    def step(params: Any, x: Any) -> Any:
        parts = []
        for index, w in enumerate(params):
            with layer(index):
                parts.append(x @ w)
        a, b, c, d = parts
        return (((a + b) + c) + d) + 1.0

    found = assigned(pipeline(2), step, [SQUARE] * 4, SQUARE)
    flat, place = regrouped(found)
    adds = named(flat.steps, "add")
    dots = {eq.outputs[0]: place[eq.serial] for eq in named(flat.steps, "dot_general")}
    inside = [eq for eq in adds if all(v in dots for v in eq.inputs)]
    assert len(adds) == 4
    assert sorted(place[eq.serial] for eq in inside) == [0, 1]
    for eq in inside:
        assert {dots[v] for v in eq.inputs} == {place[eq.serial]}
    literal = [eq for eq in adds if any(isinstance(v, Lit) for v in eq.inputs)]
    assert all(sum(isinstance(v, Lit) for v in eq.inputs) == 1 for eq in literal)


def test_a_sum_may_have_more_terms_than_python_has_frames() -> None:
    def step(params: Any, x: Any) -> Any:
        total = jnp.zeros(())
        for index, w in enumerate(params):
            with layer(index):
                part = (x @ w).sum()
            for number in range(600):
                total += lax.mul(part, float(number))
        return total

    flat, place = regrouped(assigned(pipeline(2), step, PAIR, SQUARE))
    (last,) = [eq for eq in named(flat.steps, "add") if flat.results[0] in eq.outputs]
    operands = [eq for eq in named(flat.steps, "add") if set(eq.outputs) & set(last.inputs)]
    assert {place[eq.serial] for eq in operands} == {0, 1}


def test_a_sum_that_others_read_stays_as_it_is() -> None:
    def step(params: Any, x: Any) -> Any:
        with layer(0):
            a = x @ params[0]
        with layer(1):
            b = x @ params[1]
        both = a + b
        return both + a, jnp.sin(both)

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    flat, _ = regrouped(found)
    assert [eq.serial for eq in named(flat.steps, "add")] == [
        eq.serial for eq in named(found.flat.steps, "add")
    ]


def tied(params: Any, batch: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        with layer(0):
            x = jnp.tanh(x @ params)
        with layer(1):
            return jnp.sum(x @ params)

    return microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)


def test_gradients_of_tied_weights_have_an_accumulator_each() -> None:
    found = assigned(pipeline(2), tied, SQUARE, zeros(6, 8))
    flat, place = regrouped(found)
    (before,), (after,) = loops(found.flat.steps), loops(flat.steps)
    assert (len(before.carries), len(after.carries)) == (2, 3)
    # Each accumulator has one addition, where its term is made; the total is made once, outside.
    writers = {eq.outputs[0]: place[eq.serial] for eq in named(after.body, "add")}
    squares = [c for c in after.carries if flat.avals[c.inside].ndim]
    assert sorted(writers[c.next] for c in squares) == [0, 1]
    totals = [s for s in flat.steps if not isinstance(s, Loop) and s.primitive.startswith("add")]
    assert {totals[-1].inputs[0], totals[-1].inputs[1]} == {c.result for c in squares}


@pytest.mark.parametrize("scalar", [True, False])
def test_an_accumulator_over_submeshes_is_split(scalar: bool) -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                a = x @ params[0]
            with layer(1):
                b = a @ params[1]
            return (total + (a.sum() if scalar else a)) + (b.sum() if scalar else b), None

        start = jnp.float32(1) if scalar else jnp.ones((8, 8))
        return lax.scan(body, start, xs)[0]

    flat, _ = regrouped(assigned(pipeline(2), step, PAIR, zeros(3, 8, 8)))
    (loop,) = loops(flat.steps)
    assert len(loop.carries) == 2
    assert all(loop.carries[0].init != other.init for other in loop.carries[1:])


def test_one_addition_an_iteration_touches_an_accumulator() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            with layer(0):
                a = x @ params[0]
            with layer(1):
                b = a @ params[1]
            return (total + b) + jnp.sin(b), None

        return lax.scan(body, jnp.ones((8, 8)), xs)[0]

    flat, _ = regrouped(assigned(pipeline(2), step, PAIR, zeros(3, 8, 8)))
    (loop,) = loops(flat.steps)
    (carry,) = loop.carries
    (reader,) = [eq for eq in named(loop.body, "add") if carry.inside in eq.inputs]
    assert reader.outputs[0] == carry.next


# --- saved ---------------------------------------------------------------------------------------


def test_a_remat_region_over_submeshes_recomputes_from_saved_values() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda p: jax.checkpoint(mlp)(p, x).sum())(params)

    found = assigned(pipeline(2), step, PAIR, SQUARE)
    flat = prune(use_saved(found.flat, found.place, found.match))
    maker = {v: eq for eq in flat.steps if not isinstance(eq, Loop) for v in eq.outputs}
    for eq in maker.values():
        for var in eq.inputs:
            if isinstance(var, Lit) or var not in maker or eq.scope.transposes == 0:
                continue
            recomputed = maker[var].primitive == "tanh" and maker[var].scope.transposes > 0
            assert not (recomputed and found.place[maker[var].serial] != found.place[eq.serial])
    # within a submesh it is still recomputed
    assert any(eq.scope.transposes for eq in named(flat.steps, "tanh"))


def test_random_numbers_of_other_keys_are_not_taken_for_equal() -> None:
    def step(params: Any, x: Any, key: Any) -> Any:
        def model(params: Any, x: Any) -> Any:
            for index, w in enumerate(params):
                with layer(index):
                    noise = jax.random.normal(jax.random.fold_in(key, index), x.shape)
                    x = jnp.tanh(x @ w + noise)
            return x

        return jax.value_and_grad(lambda p: jax.checkpoint(model)(p, x).sum())(params)

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = assigned(pipeline(2), step, PAIR, SQUARE, key)
    before = {eq.serial: eq for eq in named(found.flat.steps, "add")}
    for eq in named(use_saved(found.flat, found.place, found.match).steps, "add"):
        assert len(set(eq.inputs)) == len(set(before[eq.serial].inputs))


def test_values_inside_a_loop_are_not_saved_for_what_stands_behind_it() -> None:
    def step(params: Any, row: Any, xs: Any) -> Any:
        def wide() -> Any:
            return jnp.exp(row[:, None] * jnp.ones((1, 64)))  # too large to leave the loop

        def body(total: Any, x: Any) -> Any:
            with layer(0):
                x = x @ params[0] @ wide()
            with layer(1):
                return total + x @ wide().T @ params[1], None

        def loss(params: Any) -> Any:
            return lax.scan(body, jnp.zeros((8, 8)), xs)[0].sum()

        return jax.value_and_grad(loss)(params)

    found = assigned(pipeline(2), step, PAIR, zeros(8), zeros(3, 8, 8))
    flat = use_saved(found.flat, found.place, found.match)
    known = {*flat.arguments, *flat.constants}
    for made in flat.steps:
        if isinstance(made, Loop):
            inside = {v for s in made.body for v in s.outputs}
            known |= {made.index, *(carry.inside for carry in made.carries)}
            reads = [v for s in made.body if not isinstance(s, Loop) for v in s.inputs]
            assert {v for v in reads if not isinstance(v, Lit)} <= known | inside
        known |= set(made.outputs)
