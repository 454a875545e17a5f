"""What grows a value moves to the one submesh that reads it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multimesh._src.staging.mjit import mjit
from tests.partition.programs import cut
from tests.programs.plainly import check, layer, normal, pipeline

X, W, W2 = normal(8, 8, seed=1), normal(8, 8, seed=2) / 8, normal(32, 8, seed=3) / 8


def places(function: Any, *args: Any, stages: int = 2) -> dict[str, list[int]]:
    """The submeshes of the equations with each primitive, in order of the program."""
    _, texts = cut(pipeline(stages), function, *args)
    found: dict[str, list[int]] = {}
    for name, place in re.findall(r"= (\w+) .*@(\d+)", texts["assign"]):
        found.setdefault(name, []).append(int(place))
    return found


def edges(function: Any, *args: Any, stages: int = 2) -> set[tuple[str, str, str]]:
    """Why, which edge and which type of all that crosses."""
    with pipeline(stages):
        report = mjit(function).lower(*args).explain()
    return {(r.why, r.edge, r.type) for r in report.reshards if r.why not in ("result", "view")}


def grows(w: Any, w2: Any, x: Any) -> Any:
    with layer(0):
        x = x @ w
    for size in (8, 16):
        x = lax.pad(x, jnp.float32(0), ((0, 0, 0), (0, size, 0)))
    with layer(1):
        return x @ w2


def test_a_chain_that_grows_runs_where_it_is_read():
    found = places(grows, W, W2, X)
    assert found["pad"] == [1, 1]
    assert ("value", "stage=0 -> stage=1", "float32[8,8]") in edges(grows, W, W2, X)
    check(pipeline(2), grows, W, W2, X)


def test_its_gradient_shrinks_before_it_crosses():
    def loss(*args: Any) -> Any:
        return grows(*args).sum()

    gradient = jax.grad(loss, (0, 1))
    crossing = edges(gradient, W, W2, X)
    assert ("gradient", "stage=1 -> stage=0", "float32[8,8]") in crossing
    assert all(type_ == "float32[8,8]" for why, _, type_ in crossing if why != "argument")
    check(pipeline(2), gradient, W, W2, X)


def test_what_shrinks_stays():
    def function(w: Any, w2: Any, x: Any) -> Any:
        with layer(0):
            x = x @ w
        x = jnp.max(x, axis=1, keepdims=True)
        with layer(1):
            return x @ w2[:1]

    assert places(function, W, W2, X)["reduce_max"] == [0]


def test_what_two_submeshes_read_is_made_once_beside_one_of_them():
    """Half of it crosses to one reader, the whole to the other: less than the whole to both."""

    def function(w: Any, w2: Any, x: Any) -> Any:
        with layer(0):
            x = x @ w
        x = lax.concatenate([x, x * 2], 1)
        with layer(1):
            y = x @ w2[:16]
        with layer(2):
            return y + x @ w2[:16]

    assert places(function, W, W2, X, stages=3)["concatenate"] == [1]


def test_results_and_what_loops_carry_stay():
    def function(w: Any, x: Any) -> Any:
        def body(total: Any, _: Any) -> Any:
            with layer(0):
                y = total[:, :8] @ w
            grown = lax.concatenate([y, y * 2], 1)
            with layer(1):
                return grown, (grown @ grown.T).sum()

        return lax.scan(body, lax.concatenate([x, x], 1), None, length=3)

    check(pipeline(2), function, W, X)


def test_what_is_sent_anyway_is_sent_once():
    """`2.5 * y` is as large as `y`, which crosses for its own sake."""

    def function(w: Any, scale: Any, x: Any) -> Any:
        with layer(0):
            y = x @ w
        scaled = y * scale
        with layer(1):
            return scaled @ y

    assert places(function, W, jnp.float32(2.5), X)["mul"] == [1]
    assert len(edges(function, W, jnp.float32(2.5), X)) == 1


def test_the_gradient_of_a_skip_takes_no_way_round():
    def loss(w: Any, w2: Any, x: Any) -> Any:
        with layer(0):
            skip = x @ w
        with layer(1):
            y = jnp.tanh(skip)
        with layer(2):
            return (lax.concatenate([y, skip], 1) @ w2[:16]).sum()

    gradient = jax.grad(loss, (0, 1))
    gradients = {edge for why, edge, _ in edges(gradient, W, W2, X, stages=3) if why == "gradient"}
    assert gradients == {"stage=2 -> stage=1", "stage=2 -> stage=0", "stage=1 -> stage=0"}
    check(pipeline(3), gradient, W, W2, X)
