"""Remat with policies, and derivatives of every kind, of programs over several submeshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from multimesh._src.staging.mjit import mjit
from tests.programs.judged import judge, judge_steps, loss_of, train
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


# --- remat ---------------------------------------------------------------------------------------

POLICIES = {
    "default": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "both": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names("hidden"),
        jax.checkpoint_policies.dots_saveable,
    ),
}


def named_block(x, w):
    hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
    return jnp.tanh(hidden @ w.T) + x


@pytest.mark.parametrize("policy", POLICIES)
def test_remat_around_one_layer_and_around_the_model(policy):
    def one_layer(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = jax.checkpoint(named_block, policy=POLICIES[policy])(x, w)
        return x

    def whole(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = named_block(x, w)
        return x

    def both(params, x):
        return jax.checkpoint(whole, policy=POLICIES[policy])(params, one_layer(params, x))

    judge_steps(pipeline(2), train(loss_of(both), 4), weights(2), (X, Y), steps=2)


@pytest.mark.parametrize("prevent_cse", [False, True])
def test_remat_without_barriers_and_with_static_arguments(prevent_cse):
    @functools.partial(jax.checkpoint, prevent_cse=prevent_cse, static_argnums=(2,))
    def model(params, x, scale):
        return mlp(params, x) * scale

    def loss(params, batch):
        return jnp.mean((model(params, batch[0], 3) - batch[1]) ** 2)

    judge_steps(pipeline(2), train(loss), weights(3), (X, Y), steps=2)


# --- derivatives ---------------------------------------------------------------------------------


def test_custom_vjp_with_static_arguments_inside_and_around_tasks():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(factor, x):
        return x * factor

    scaled.defvjp(lambda factor, x: (x * factor, x), lambda factor, x, g: (g * factor + 0 * x,))

    @jax.custom_vjp
    def around(params, x):
        return mlp(params, x)

    def forward(params, x):
        return mlp(params, x), (params, x)

    def backward(saved, g):
        _, pull = jax.vjp(mlp, *saved)  # recomputes the model in the backward pass
        return pull(g * 0.5)

    around.defvjp(forward, backward)

    def model(params, x):
        with layer(0):
            x = scaled(2.0, x @ params[0])
        return scaled(0.5, around(params, x))

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y), steps=3)


def test_custom_jvp_over_stages():
    @jax.custom_jvp
    def model(params, x):
        return mlp(params, x)

    @model.defjvp
    def rule(primals, tangents):
        y, dy = jax.jvp(mlp, primals, tangents)
        return y, dy * 0.5

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y), steps=3)


def test_linearize_and_linear_transpose():
    def function(params, batch):
        value, tangent = jax.linearize(lambda p: square_loss(p, batch), params)
        (pulled,) = jax.linear_transpose(tangent, params)(1.0)
        return value, tangent(pulled), pulled

    judge(pipeline(2), function, weights(2), (X, Y))


@pytest.mark.parametrize("size", [0, 4])
def test_gradient_of_gradient(size):
    def penalty(params, batch):
        def slope(x):
            return jnp.sum(mlp(params, x))

        return jnp.mean(jax.grad(slope)(batch[0]) ** 2) + square_loss(params, batch)

    judge_steps(pipeline(2), train(penalty, size), weights(2), (X, Y), steps=2)


def test_jacobians_and_hessian():
    def small(params, x):
        return mlp(params, x).sum(0)

    def function(params, x):
        last = params[1]

        def by_last(w):
            return small([params[0], w], x).sum()

        return (
            jax.jacrev(small)(params, x),
            jax.jacfwd(small, argnums=1)(params, x),
            jax.hessian(by_last)(last),
            jax.jvp(lambda p: small(p, x), (params,), (params,)),
        )

    judge(pipeline(2), function, weights(2), X[:2])


def test_gradient_of_a_jitted_function():
    """Its transpose stands in the scopes around the call alone (R2)."""
    loss = jax.jit(square_loss)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return sgd(params, grads), value

    multi = pipeline(2)
    staged = judge_steps(multi, step, weights(2), (X, Y))
    tasks = staged.trace(weights(2), (X, Y)).lower()._partitioned.program.tasks
    assert {"layer0_fwd", "layer0_bwd", "layer1_fwd", "layer1_bwd"} <= {t.name for t in tasks}


def test_eager_gradient_of_a_staged_loss():
    with pipeline(2):
        loss = mjit(square_loss)
    value, grads = jax.value_and_grad(loss)(weights(2), (X, Y))
    expected = jax.value_and_grad(square_loss)(weights(2), (X, Y))
    for got, want in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_implicit_derivatives_inside_a_stage():
    """A linear solve and a fixed point with their own derivatives, made of inner functions."""

    def model(params, x):
        with layer(0):
            matrix = params[0] @ params[0].T + 2 * jnp.eye(4)
            x = lax.custom_linear_solve(
                lambda v: v @ matrix,
                x,
                lambda _, b: jnp.linalg.solve(matrix.T, b.T).T,
                symmetric=True,
            )
        with layer(1):
            return jnp.tanh(x @ params[1])

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y), steps=2)
