"""Passes on the flat program: inline, prune, simplify_loops, store_microbatch_major."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import Lit, all_equations
from multimesh._src.jax_compat import name_stack
from multimesh._src.partition.batches import Batch, store_microbatch_major
from multimesh._src.partition.inline import inline
from multimesh._src.partition.prune import prune, trim
from multimesh._src.partition.seeds import Seeds
from tests.partition.programs import (
    inlined,
    loops,
    named,
    primitives,
    simplified,
    traced,
    zeros,
)
from tests.programs.plainly import check, layer, normal, pipeline, weights

SQUARE = zeros(8, 8)


def two_layers(params: Any, x: Any) -> Any:
    for index, w in enumerate(params):
        with layer(index):
            x = x @ w
    return x


# --- inline --------------------------------------------------------------------------------------


def test_inner_jits_and_custom_derivatives_are_opened_with_the_scope_of_each_call() -> None:
    @jax.jit
    def shared(x: Any) -> Any:
        return jax.nn.relu(jax.jit(jnp.sin)(x))

    def step(x: Any) -> Any:
        for index in range(2):
            with layer(index):
                x = shared(x)
        return x

    flat = inlined(pipeline(2), step, SQUARE)
    assert [str(eq.scope) for eq in named(flat.steps, "sin")] == ["layer0", "layer1"]
    assert not {"jit", "pjit", "custom_jvp_call"} & set(primitives(flat.steps))


@pytest.mark.parametrize(("stages", "is_cut"), [(1, False), (2, True)])
def test_loops_and_remat_are_cut_only_over_several_submeshes(stages: int, is_cut: bool) -> None:
    def step(params: Any, x: Any) -> Any:
        x, _ = lax.scan(lambda x, _: (two_layers(params, x), None), x, None, length=3)
        return jax.grad(lambda x: jax.checkpoint(two_layers)(params, x).sum())(x)

    flat = inlined(pipeline(stages), step, [SQUARE, SQUARE], SQUARE)
    found = primitives(flat.steps)
    assert ("loop" in found, "scan" in found) == (is_cut, not is_cut)
    assert any(name.startswith("remat") for name in found) != is_cut


def test_empty_loops_are_not_cut() -> None:
    def step(params: Any, xs: Any) -> Any:
        return lax.scan(lambda x, _: (two_layers(params, x), x), jnp.ones((8, 8)), xs)

    flat = inlined(pipeline(2), step, [SQUARE, SQUARE], zeros(0, 8, 8))
    assert "scan" in primitives(flat.steps)


def test_slices_and_stacks_are_written_out() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            y = two_layers(params, x)
            return total + y, y

        return lax.scan(body, jnp.zeros((8, 8)), xs, reverse=True)

    (loop,) = loops(inlined(pipeline(2), step, [SQUARE, SQUARE], zeros(3, 8, 8)).steps)
    assert loop.length == 3
    assert len(loop.carries) == 2
    body = primitives(loop.body)
    assert body[:3] == ["sub", "dynamic_slice", "squeeze"]
    assert body[-1] == "dynamic_update_slice"


def test_weak_types_survive_equations_of_our_own() -> None:
    def step(params: Any, x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, c: (two_layers(params, c[0]), i), (x, jnp.int32(9)))

    flat = simplified(pipeline(2), step, [SQUARE, SQUARE], SQUARE)
    index = flat.results[1]
    assert not isinstance(index, Lit)
    assert flat.avals[index].weak_type


# --- prune ---------------------------------------------------------------------------------------


def test_prune_drops_what_is_not_read() -> None:
    def step(x: Any) -> Any:
        jnp.cos(x)
        return jnp.sin(x)

    assert primitives(prune(inlined(pipeline(2), step, SQUARE)).steps) == ["sin"]


def test_prune_keeps_effects() -> None:
    def step(x: Any) -> Any:
        jax.debug.callback(lambda y: None, jnp.cos(x))
        return jnp.sin(x)

    found = primitives(prune(inlined(pipeline(2), step, SQUARE)).steps)
    assert {"cos", "sin", "debug_callback"} <= set(found)


def test_prune_drops_carries_that_only_feed_themselves() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            a, b, c = carry
            y = two_layers(params, x)
            return (a + y, b + a, c * y), (y, jnp.sin(y))

        start = (jnp.zeros((8, 8)),) * 3
        (a, _b, _c), (ys, _) = lax.scan(body, start, xs)
        return a, ys

    flat = inlined(pipeline(2), step, [SQUARE, SQUARE], zeros(3, 8, 8))
    (before,), (after,) = loops(flat.steps), loops(prune(flat).steps)
    assert len(before.carries) == 5
    assert len(after.carries) == 2
    assert not {"mul", "sin"} & set(primitives(after.body))


def test_prune_drops_whole_loops_and_is_idempotent() -> None:
    def step(params: Any, x: Any) -> Any:
        lax.scan(lambda c, _: (two_layers(params, c), None), x, None, length=3)
        return x + 1

    once = prune(inlined(pipeline(2), step, [SQUARE, SQUARE], SQUARE))
    assert primitives(once.steps) == ["add"]
    assert prune(once) == once


# --- simplify_loops ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["xs", "carry", "operand"])
def test_control_flow_is_given_only_what_it_reads(kind: str) -> None:
    def fun(params: Any, x: Any) -> Any:
        with layer(0):
            rows = (x @ params[0])[:, 0]
        with layer(1):
            large = jnp.tanh(x @ params[1])
        if kind == "xs":
            made = lax.scan(lambda c, t: (c * 0.5 + t[0], t[1]), 0.0, (rows, large))[0]
        elif kind == "carry":
            made = lax.scan(lambda c, t: ((c[0] + t, c[1] + 1), None), (0.0, large), rows)[0][0]
        else:
            made = lax.cond(rows[0] > 0, lambda r, _: r.sum(), lambda r, _: r.max(), rows, large)
        return made, large.sum()

    flat = trim(inlined(pipeline(2), fun, [SQUARE, SQUARE], SQUARE))
    (large,) = (eq.outputs[0] for eq in named(flat.steps, "tanh"))
    readers = [eq.primitive for eq in all_equations(flat.steps) if large in eq.inputs]
    assert readers == ["reduce_sum"]
    check(pipeline(2), fun, weights(2, 8), normal(8, 8))


def test_counters_and_key_chains_become_a_small_scan_before_the_loop() -> None:
    def step(params: Any, key: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            key, count, total = carry
            key, now = jax.random.split(key)
            y = two_layers(params, x + jax.random.normal(now, (8, 8))) * count
            return (key, count + 1, total + y), None

        return lax.scan(body, (key, jnp.float32(0), jnp.zeros((8, 8))), xs)[0]

    args = ([SQUARE, SQUARE], jax.eval_shape(lambda: jax.random.key(0)), zeros(3, 8, 8))
    flat = simplified(pipeline(2), step, *args)
    (loop,) = loops(flat.steps)
    assert len(loop.carries) == 1
    assert "scan" in primitives(flat.steps)
    assert loop.length == 3


def test_what_a_task_computes_is_no_counter() -> None:
    def step(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            with layer(0):
                count = carry + 1
                y = (x @ params[0]) * count
            with layer(1):
                return count, y @ params[1]

        return lax.scan(body, jnp.float32(0), xs)

    (loop,) = loops(simplified(pipeline(2), step, [SQUARE, SQUARE], zeros(3, 8, 8)).steps)
    assert len(loop.carries) == 2


def test_fixed_carries_become_the_value_from_outside_also_from_loop_to_loop() -> None:
    def step(params: Any, x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            fixed, total = carry
            return (fixed, total + two_layers(params, fixed)), None

        (fixed, a), _ = lax.scan(body, (x, jnp.zeros((8, 8))), None, length=2)
        (fixed, b), _ = lax.scan(body, (fixed, jnp.zeros((8, 8))), None, length=2)
        return fixed, a, b

    flat = simplified(pipeline(2), step, [SQUARE, SQUARE], SQUARE)
    assert [len(loop.carries) for loop in loops(flat.steps)] == [1, 1]
    assert flat.results[0] == flat.arguments[2]


@pytest.mark.parametrize("hoist", [True, False])
def test_invariants_move_out_unless_they_grow(hoist: bool) -> None:
    def step(params: Any, row: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            half = params[0].astype(jnp.bfloat16)  # smaller than what it is made of
            wide = jnp.exp(row)[None] * jnp.ones((64, 1))  # larger
            with layer(0):
                y = x.astype(jnp.bfloat16) @ half
            with layer(1):
                return total + y.astype(jnp.float32) @ params[1] + wide.sum(0), None

        return lax.scan(body, jnp.zeros((8, 8)), xs)[0]

    args = ([SQUARE, SQUARE], zeros(8), zeros(3, 8, 8))
    flat = simplified(pipeline(2), step, *args, hoist=hoist)
    (loop,) = loops(flat.steps)
    outside, inside = primitives(flat.steps), primitives(loop.body)
    assert ("exp" in outside, "convert_element_type" in outside) == (hoist, hoist)
    assert "mul" in inside


def test_effects_stay_in_the_loop() -> None:
    def step(params: Any, x: Any, xs: Any) -> Any:
        def body(total: Any, y: Any) -> Any:
            jax.debug.callback(lambda _: None, x)
            return total + two_layers(params, y), None

        return lax.scan(body, jnp.zeros((8, 8)), xs)[0]

    args = ([SQUARE, SQUARE], zeros(2), zeros(3, 8, 8))
    (loop,) = loops(simplified(pipeline(2), step, *args).steps)
    assert "debug_callback" in primitives(loop.body)


# --- microbatch-major batches --------------------------------------------------------------------


def microbatched(dim: int, read_twice: bool = False) -> Any:
    def step(params: Any, x: Any) -> Any:
        def forward(params: Any, x: Any) -> Any:
            return two_layers(params, jnp.moveaxis(x, dim, 0)).sum()

        total = microbatch(forward, dim, 2, argnum=1)(params, x)
        return total + x.sum() if read_twice else total

    return step


def stored_batches(function: Any, *args: Any) -> Any:
    """The program before and after batches are stored, the function after, and the batches."""
    found = traced(pipeline(2), function, *args)
    flat = inline(found, Seeds(found.matcher))
    return flat, *store_microbatch_major(flat, found)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_that_only_the_loop_reads_is_stored_microbatch_major(dim: int) -> None:
    shape = (6, 8) if dim == 0 else (8, 6)
    args = ([SQUARE, zeros(8, 8)], zeros(*shape))
    flat, stored, function, batches = stored_batches(microbatched(dim), *args)
    assert batches == {2: Batch(3, dim)}
    assert stored.avals[stored.arguments[2]].shape == (3, 2, 8) if dim == 0 else (3, 8, 2)
    assert "reshape" not in primitives(stored.steps)
    assert stored.arguments[:2] == flat.arguments[:2]
    assert [argument.index for argument in function.arguments] == [0, 1, 2]


def test_a_batch_that_is_also_read_whole_is_taken_twice() -> None:
    args = ([SQUARE, SQUARE], zeros(6, 8))
    flat, stored, function, batches = stored_batches(microbatched(0, read_twice=True), *args)
    assert batches == {3: Batch(3, 0)}
    assert stored.arguments[:3] == flat.arguments
    assert [argument.index for argument in function.arguments] == [0, 1, 2, 2]
    assert "reshape" not in primitives(stored.steps)


def test_loops_that_cut_alike_share_one_form_of_a_batch() -> None:
    def step(params: Any, x: Any) -> Any:
        def total(size: int, x: Any) -> Any:
            return microbatch(lambda p, b: two_layers(p, b).sum(), 0, size, argnum=1)(params, x)

        constrained = lax.with_sharding_constraint(x, P("data"))
        return total(2, x) + total(2, constrained), total(3, constrained), constrained

    args = ([SQUARE, SQUARE], zeros(6, 8))
    _, stored, function, batches = stored_batches(step, *args)
    assert batches == {3: Batch(3, 0), 4: Batch(2, 0)}
    assert [argument.index for argument in function.arguments] == [0, 1, 2, 2, 2]
    constraints = [e for e in all_equations(stored.steps) if e.eqn.primitive is constraint_p]
    assert [len(e.eqn.params["dims"]) for e in constraints] == [2, 3, 3]


def test_a_reshape_of_the_users_own_is_no_batch() -> None:
    def step(params: Any, x: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return total + two_layers(params, x), None

        return lax.scan(body, jnp.zeros((2, 8)), x.reshape(3, 2, 8))[0]

    flat, stored, _, batches = stored_batches(step, [SQUARE, SQUARE], zeros(6, 8))
    assert (stored, batches) == (flat, {})


def test_constants_are_taken_once() -> None:
    table = jnp.asarray(np.ones((8, 8), "float32"))

    def step(x: Any) -> Any:
        return jax.jit(lambda y: y @ table)(x) + table

    flat = inlined(pipeline(2), step, SQUARE)
    assert len(flat.constants) == 1
    assert name_stack.source_line(flat.steps[0].eqn)  # type: ignore[union-attr]
