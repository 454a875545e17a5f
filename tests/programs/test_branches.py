"""Conditionals over several submeshes (R12): `cond` and `switch`, their gradients and effects."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task
from multimesh._src.staging.mjit import mjit
from tests.programs.judged import judge, judge_steps, train
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)
FLAGS = np.array([1, 1, 0, 0, 1, 1, 0, 0], bool)


def deep_or_shallow(params, x, flag):
    """Both layers, or the second alone with other work: each branch has a scalar of its own."""

    def deep(x):
        x = mlp(params, x)
        return x, x.sum()

    def shallow(x):
        with layer(1):
            return jnp.sin(x @ params[1]), jnp.float32(0)

    return lax.cond(flag, deep, shallow, x)


def branching_loss(params, batch):
    x, y, flag = batch
    h, extra = deep_or_shallow(params, x, flag[0])
    return jnp.mean((h - y) ** 2) + 0.01 * extra


@pytest.mark.parametrize("flag", [True, False])
def test_one_conditional_per_submesh(flag):
    def forward(params, x, flag):
        return deep_or_shallow(params, x, flag)

    staged = judge(pipeline(2), forward, weights(2), X, flag)
    tasks = staged.trace(weights(2), X, flag).lower()._partitioned.program.tasks
    conds = [[eqn.primitive.name for eqn in task.body.eqns].count("cond") for task in tasks]
    assert [task.name for task in tasks] == ["layer0_fwd", "layer1_fwd"]
    assert conds == [1, 1]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("size", [0, 2])
def test_gradients(size, width):
    for flags in (FLAGS, ~FLAGS) if width == 1 else (FLAGS,):
        step = train(branching_loss, size)
        judge_steps(pipeline(2, width), step, weights(2), (X, Y, flags))


def test_the_flag_decides_at_every_call():
    multi = pipeline(2)
    with multi:
        step = mjit(train(branching_loss, 0))
    plain = jax.jit(train(branching_loss, 0))
    for flag in (True, False, True):
        batch = (X, Y, np.full(8, flag))
        ours, expected = step(weights(2), batch), plain(weights(2), batch)
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_schedules(schedule):
    step = train(branching_loss, schedule=schedule)
    judge_steps(pipeline(2, halves=True), step, weights(2), (X, Y, FLAGS))


@pytest.mark.parametrize("choice", [0, 1, 2, 7])
def test_switch_with_unlike_work_and_nested_conditionals(choice):
    def loss(params, batch):
        x, y, choice = batch

        def inner(x):
            x = lax.cond(x.sum() > 0, lambda x: mlp(params[:2], x), lambda x: -x, x)
            with layer(2):
                return x @ params[2]

        def backwards(x):
            for index in (2, 1, 0):
                with layer(index):
                    x = jnp.tanh(x @ params[index])
            return x

        x = lax.switch(choice, [inner, backwards, lambda x: x], x)
        return jnp.mean((x - y) ** 2)

    judge_steps(pipeline(3), train(loss, 0), weights(3), (X, Y, choice), steps=3)


def test_skipped_layers():
    """Stochastic depth: a branch that returns its operand, in every layer and around two."""

    def loss(params, batch, keep):
        x, y = batch

        def pair(x):
            return mlp(params[:2], x)

        x = lax.cond(keep[0], pair, lambda x: x, x)
        for index in (2, 3):
            with layer(index):
                x = lax.cond(
                    keep[index], lambda x, w: jnp.tanh(x @ w), lambda x, w: x, x, params[index]
                )
        return jnp.mean((x - y) ** 2)

    def step(state, batch):
        params, key = state
        key, sub = jax.random.split(key)
        keep = jax.random.bernoulli(sub, 0.5, (4,))
        grad = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)
        value, grads = grad(params, batch, keep)
        return (sgd(params, grads), key), value

    judge_steps(pipeline(4), step, (weights(4), jax.random.key(3)), (X, Y))


def test_conditional_inside_remat_and_remat_inside_conditional():
    def loss(params, batch):
        x, y, flag = batch
        again = jax.checkpoint(lambda params, x: deep_or_shallow(params, x, flag[0]))
        x, extra = again(params, x)
        x = lax.cond(flag[1], jax.checkpoint(mlp), lambda params, x: x, params, x)
        return jnp.mean((x - y) ** 2) + 0.01 * extra

    for size in (0, 2):
        judge_steps(pipeline(2), train(loss, size), weights(2), (X, Y, FLAGS), steps=2)


def test_gradient_of_gradient_and_jvp():
    def penalty(params, batch):
        value, grads = jax.value_and_grad(branching_loss)(params, batch)
        return value + sum(jnp.sum(g**2) for g in grads)

    judge_steps(pipeline(2), train(penalty, 0), weights(2), (X, Y, FLAGS), steps=2)

    def tangent(params, batch):
        return jax.jvp(lambda p: branching_loss(p, batch), (params,), (params,))

    for flags in (FLAGS, ~FLAGS):
        judge(pipeline(2), tangent, weights(2), (X, Y, flags))


# --- what is not taken ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 2])
def test_effects_happen_in_the_branch_that_is_taken_alone(size):
    def loss(seen, params, batch):
        x, y, flag = batch

        def deep(x):
            for index, w in enumerate(params):
                with layer(index):
                    x = jnp.tanh(x @ w)
                    jax.debug.callback(lambda _, n=index: seen.append(("deep", n)), x.sum())
            return x

        def shallow(x):
            with layer(1):
                jax.debug.callback(lambda _: seen.append(("shallow", 1)), x.sum())
                return x @ params[1]

        return jnp.mean((lax.cond(flag[0], deep, shallow, x) - y) ** 2)

    def run(jit):
        seen = []
        step = jit(train(lambda params, batch: loss(seen, params, batch), size))
        jax.block_until_ready(step(weights(2), (X, Y, FLAGS)))
        jax.block_until_ready(step(weights(2), (X, Y, ~FLAGS)))
        jax.effects_barrier()
        return sorted(seen)

    with pipeline(2):
        ours = run(mjit)
    assert ours == run(jax.jit)
    assert ours


def test_no_nan_of_a_branch_that_is_not_taken():
    def loss(params, batch):
        x, y, flag = batch

        def bad(x):
            for index, w in enumerate(params):
                with layer(index):
                    x = jnp.log(-1 - (x @ w) ** 2)
            return x

        return jnp.mean((lax.cond(flag[0], lambda x: mlp(params, x), bad, x) - y) ** 2)

    with jax.debug_nans(True):
        judge_steps(pipeline(2), train(loss, 0), weights(2), (X, Y, ~FLAGS | True), steps=2)


# --- optimizers ----------------------------------------------------------------------------------


def optimized(optimizer, size=2, loss=square_loss):
    def step(state, batch):
        params, opt_state = state
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, reduce="mean")
        value, grads = grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


OPTIMIZERS = {
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 3
    ),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), 2
    ),
    "skipping MultiSteps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_conditional_updates(name):
    """Widths above the size under which arrays live everywhere."""
    optimizer = OPTIMIZERS[name]()
    params, batch = weights(4, 8), (normal(8, 8, seed=1), normal(8, 8, seed=2))
    staged = judge_steps(pipeline(2), optimized(optimizer), (params, optimizer.init(params)), batch)
    moved = _large_moves(staged, (params, optimizer.init(params)), batch)
    assert moved == [], f"state crosses: {moved}"


def _large_moves(staged, *args):
    """What crosses outside the microbatch loop and is larger than a scalar."""
    plan = staged.trace(*args).lower()._partitioned.plan
    loop = [n for n, step in enumerate(plan.steps) if getattr(step, "iteration", -1) >= 0]
    return [
        plan.slots[slot].aval.str_short()
        for step in plan.steps[loop[-1] + 1 :]
        if hasattr(step, "sources")
        for slot in step.sources
        if plan.slots[slot].aval.size > 1
    ]


def test_a_gradient_that_is_not_finite_is_skipped():
    optimizer = OPTIMIZERS["apply_if_finite"]()
    params = weights(4)
    step = optimized(optimizer)
    bad = np.where(np.arange(8)[:, None] == 5, np.inf, X).astype("float32")
    with pipeline(2):
        ours = mjit(step)
    plain = jax.jit(step)
    state = expected = (params, optimizer.init(params))
    for x in (X, bad, X, bad, bad):
        (state, _), (expected, _) = ours(state, (x, Y)), plain(expected, (x, Y))
        for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert int(expected[1].total_notfinite) == 3


def test_loss_scaling_with_overflow_skip():
    def step(state, batch):
        params, scale, good = state

        def loss(params, batch):
            return (square_loss(params, batch) * scale).astype("float32")

        value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
        finite &= good % 3 != 2  # an overflow at every third step

        def update(_):
            unscaled = [g / scale for g in grads]
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in unscaled))
            clipped = [g / jnp.maximum(norm, 1) for g in unscaled]
            return sgd(params, clipped), scale * 2

        params, scale = lax.cond(finite, update, lambda _: (params, scale / 2), None)
        return (params, scale, good + 1), value

    judge_steps(pipeline(2), step, (weights(4), np.float32(8), 0), (X, Y))


# --- around loops --------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False])
def test_microbatch_loop_inside_a_branch(flag):
    def step(params, batch):
        x, y, flag = batch

        def learn(params):
            grad = microbatch(jax.value_and_grad(square_loss), 0, 2, argnum=1)
            value, grads = grad(params, (x, y))
            return sgd(params, grads), value

        def rest(params):
            return params, jnp.float32(-1)

        return lax.cond(flag[0], learn, rest, params)

    staged = judge_steps(pipeline(2), step, weights(2), (X, Y, np.full(8, flag)), steps=3)
    assert staged.trace(weights(2), (X, Y, FLAGS)).lower().schedule is not None


def test_scan_over_layers_inside_a_branch():
    multi = pipeline(2)
    multi.register_task(
        "block",
        scanned=True,
        callback=lambda name, backprop: Task(
            name=name, mesh_slice={"stage": int(name.split("_")[1]) // 2}
        ),
    )

    def loss(stack, batch):
        x, y, flag = batch

        def layers(x):
            def body(h, w):
                with jax.named_scope("block"):
                    return jnp.tanh(h @ w), None

            return lax.scan(body, x, stack)[0]

        return jnp.mean((lax.cond(flag[0], layers, lambda x: x, x) - y) ** 2)

    step = train(loss)
    judge_steps(multi, step, normal(4, 4, 4) / 2, (X, Y, FLAGS), steps=2)


def test_conditional_in_a_scan_of_steps():
    """Sequential iterations: every third step is skipped by a condition on the counter."""

    def step(params, batches):
        def body(carry, batch):
            params, count = carry

            def learn(params):
                value, grads = jax.value_and_grad(square_loss)(params, batch)
                return sgd(params, grads), value

            def rest(params):
                return params, jnp.float32(0)

            params, value = lax.cond(count % 3 < 2, learn, rest, params)
            return (params, count + 1), value

        (params, _), values = lax.scan(body, (params, 0), batches)
        return params, values

    batches = normal(4, 8, 4, seed=5), normal(4, 8, 4, seed=6)
    judge_steps(pipeline(2), step, weights(2), batches, steps=3)


def test_logical_axes_inside_a_branch():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    multi = MultiMesh(global_mesh=jax.sharding.Mesh(devices, ("stage", "data")))
    multi.register_task(
        r"layer\d+",
        callback=lambda name, backprop: Task(
            name=name,
            mesh_slice={"stage": int(name[5:]) % 2},
            logical_axes={"batch": "data"},
        ),
    )

    def loss(params, batch):
        x, y, flag = batch

        def deep(x):
            for index, w in enumerate(params):
                with layer(index):
                    x = jax.lax.with_sharding_constraint(
                        jnp.tanh(x @ w), jax.sharding.PartitionSpec("data")
                    )
            return x

        return jnp.mean((lax.cond(flag[0], deep, lambda x: x, x) - y) ** 2)

    with multi:
        step = mjit(train(loss))
    ours = step(weights(2), (X, Y, FLAGS))
    plain = jax.jit(train(lambda p, b: _without_constraints(p, b)))(weights(2), (X, Y, FLAGS))
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _without_constraints(params, batch):
    x, y, flag = batch
    x = lax.cond(flag[0], lambda x: mlp(params, x), lambda x: x, x)
    return jnp.mean((x - y) ** 2)
