"""The control flow that a model may have: scans, maps, remat, derivatives of every kind.

`test_branches` has conditionals over several submeshes, `test_while` loops without a trip count.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.tasks import Task
from multimesh._src.staging.mjit import mjit
from tests.programs.judged import judge, judge_steps
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


def train(loss, size=2, **options):
    def step(params, batch):
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, **options)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


def loss_of(model):
    return lambda params, batch: jnp.mean((model(params, batch[0]) - batch[1]) ** 2)


# --- loops ---------------------------------------------------------------------------------------


def scanned(num_stages, num_layers):
    """`block_<i>` of a scan over layers runs on stage `i * num_stages // num_layers`."""
    multi = pipeline(num_stages)
    multi.register_task(
        "block",
        scanned=True,
        callback=lambda name, backprop: Task(
            name=name,
            mesh_slice={"stage": int(name.split("_")[1]) * num_stages // num_layers},
        ),
    )
    return multi


def scanned_model(params, x):
    def body(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), x.sum()

    x, sums = lax.scan(body, x, params)
    return x + 0.01 * sums.mean()


@pytest.mark.parametrize("size", [0, 2])
def test_scan_over_layers_through_the_stages(size):
    judge_steps(scanned(2, 4), train(loss_of(scanned_model), size), normal(4, 4, 4) / 2, (X, Y))


def test_rematerialized_scan_over_layers_through_the_stages():
    def model(params, x):
        @jax.checkpoint
        def body(x, w):
            with jax.named_scope("block"):
                return jnp.tanh(x @ w), None

        return lax.scan(body, x, params)[0]

    judge_steps(scanned(2, 4), train(loss_of(model)), normal(4, 4, 4) / 2, (X, Y), steps=2)


def test_scan_inside_a_stage_and_nested_scans():
    """Layers by scan in each stage, time by scan in each layer, with a state that is carried."""

    def model(params, x):
        def cell(state, x, w):
            state = jnp.tanh(state @ w + x)
            return state, state

        def block(xs, w):
            _, ys = lax.scan(functools.partial(cell, w=w), jnp.zeros_like(xs[0]), xs)
            return ys, ys.mean()

        xs = jnp.stack([x, x * 2, -x])
        for index, stack in enumerate(params):
            with layer(index):
                xs, means = lax.scan(block, xs, stack)
                xs += means.sum()
        return xs[-1]

    params = [normal(2, 4, 4, seed=1) / 2, normal(3, 4, 4, seed=2) / 2]
    judge_steps(pipeline(2), train(loss_of(model)), params, (X, Y))


def test_nested_scans_over_stages():
    """Both scans go through both stages; the inner one reads what the outer one carries."""

    def model(params, x):
        def outer(carry, scale):
            x, total = carry

            def inner(x, shift):
                return mlp(params, x) + shift, x.mean()

            x, means = lax.scan(inner, x * scale, jnp.arange(2.0))
            return (x, total + means.sum()), means

        (x, total), means = lax.scan(outer, (x, 0.0), jnp.array([1.0, 0.5]), reverse=True)
        return x + total + means[0, 1]

    for size in (0, 4):
        judge_steps(pipeline(2), train(loss_of(model), size), weights(2), (X, Y), steps=2)


@pytest.mark.parametrize("across", [False, True])
def test_fori_loop(across):
    def model(params, x):
        if across:
            return lax.fori_loop(0, 3, lambda i, x: mlp(params, x) * (i + 1), x)
        for index, w in enumerate(params):
            with layer(index):
                x = lax.fori_loop(0, 3, lambda i, x, w=w: jnp.tanh(x @ w) * (i + 1), x)
        return x

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y), steps=3)


def test_associative_scan():
    def model(params, x):
        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        for index, w in enumerate(params):
            with layer(index):
                gates = jax.nn.sigmoid(x @ w)
                _, x = lax.associative_scan(combine, (gates, x), axis=1)
        return lax.associative_scan(jnp.add, x, axis=1, reverse=True)

    judge_steps(pipeline(2), train(loss_of(model)), weights(2), (X, Y))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_map_around_and_inside_tasks(batch_size):
    def model(params, x):
        def one(row):
            return mlp(params, row)

        with layer(1):
            x = lax.map(lambda row: jnp.tanh(row @ params[1]), x, batch_size=batch_size)
        return lax.map(one, x, batch_size=batch_size)

    judge_steps(pipeline(2), train(loss_of(model), 4), weights(2), (X, Y), steps=2)


def test_vmap_around_and_inside_tasks():
    """An ensemble by vmap of the whole loss, and rows by vmap inside a task."""

    def model(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = jax.vmap(lambda row, w=w: jnp.tanh(row @ w))(x)
        return x

    def step(params, batch):
        grad = jax.vmap(jax.value_and_grad(loss_of(model)), in_axes=(0, None))
        value, grads = microbatch(grad, 0, 2, argnum=1)(params, batch)
        return sgd(params, grads), value

    judge_steps(pipeline(2), step, [normal(3, 4, 4, seed=n) for n in (1, 2)], (X, Y))

    def outer(params, xs):
        return jax.vmap(jax.vmap(model, (None, 0)), (None, 1), 1)(params, xs)

    judge(pipeline(2), outer, weights(2), normal(2, 3, 8, 4))


def test_several_training_steps_by_scan_and_by_fori_loop():
    def step(params, batches):
        params, values = lax.scan(train(square_loss), params, batches)
        xs, ys = batches

        def body(i, params):
            batch = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, False), (xs, ys))
            return train(square_loss)(params, batch)[0]

        return lax.fori_loop(0, 2, body, params), values

    batches = normal(3, 8, 4, seed=5), normal(3, 8, 4, seed=6)
    judge_steps(pipeline(2), step, weights(2), batches, steps=2)


# --- remat ---------------------------------------------------------------------------------------

POLICIES = {
    "default": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "all but names": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
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
