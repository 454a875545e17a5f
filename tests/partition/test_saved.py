"""R20: where a remat region spans submeshes, its parts start from what the forward tasks sent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import microbatch, mjit
from tests.programs.plainly import check, check_steps, normal, pipeline, weights

WIDTH = 4


def by_cond(x: Any, w: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) * (1 + w), lambda: x + w)


def by_scan(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda x, _: (jnp.tanh(x * w) + x, None), x, None, length=2)[0]


def by_jit(x: Any, w: Any) -> Any:
    return jax.jit(lambda x, w: jnp.tanh(x * w))(x, w)


@pytest.mark.parametrize("layer", [by_cond, by_scan, by_jit])
@pytest.mark.parametrize("schedule", ["looped-bfs", "1f1b"])
def test_no_backward_waits_for_a_recomputation_elsewhere(
    layer: Callable[..., Any], schedule: str
) -> None:
    """Autodiff gives control flow more results: it is the same computation all the same."""
    num_layers = 4 if schedule == "looped-bfs" else 2

    def model(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = layer(x, w)
        return x

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.square(jax.checkpoint(model)(params, x)).mean()

        gradient = jax.value_and_grad(loss)
        value, grads = microbatch(gradient, 0, 2, argnum=1, schedule=schedule)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [np.full(WIDTH, 0.5 + i / 8, np.float32) for i in range(num_layers)]
    x = np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)
    mesh = pipeline(2, give_stages=num_layers if schedule == "looped-bfs" else 0)
    with mesh:
        program = mjit(step).lower(params, x).program
    # An activation and its gradient for each boundary and microbatch, nothing recomputed.
    crossing = [r for r in program.reshards if f"float32[2,{WIDTH}]" in r.type]
    assert sum(reshard.copies for reshard in crossing) == 2 * 4 * (num_layers - 1)
    check_steps(mesh, step, params, x)


def by_fori(a: Any, b: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, s: (s[1] * 0.5, s[0] + s[1]), (a, b))


def by_lstm(a: Any, b: Any) -> Any:
    def cell(state: Any, _: Any) -> Any:
        h, c = state
        c = jax.nn.sigmoid(h + 1) * c + jnp.tanh(h)
        return (jnp.sin(c) * h, c), None

    return jax.lax.scan(cell, (a, b), None, length=3)[0]


@pytest.mark.parametrize("coupled", [by_fori, by_lstm])
@pytest.mark.parametrize("give_stages", [0, 4])
def test_results_that_depend_on_each_other_are_told_apart(
    coupled: Callable[..., Any], give_stages: int
) -> None:
    """The part of a loop that makes one of its results may have to make another."""
    numbers = (0, 2, 1) if give_stages else (0, 1, 0)

    def region(params: Any, x: Any) -> Any:
        with jax.named_scope(f"layer{numbers[0]}"):
            a, b = coupled(jnp.tanh(x @ params[0]), jnp.cos(x @ params[0]))
        with jax.named_scope(f"layer{numbers[1]}"):
            x = jnp.sin(a) * jnp.tanh(b @ params[1])
        with jax.named_scope(f"layer{numbers[2]}"):
            return jnp.tanh(x @ params[0])

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.checkpoint(region)(params, x) ** 2)

    mesh = pipeline(2, give_stages=give_stages)
    check(mesh, jax.value_and_grad(loss), weights(2), normal(8, 4))
