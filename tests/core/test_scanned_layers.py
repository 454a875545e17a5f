"""A scan over layers whose iterations are tasks (R11, `scanned=True`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from multimesh.jax import MultiMesh, Task, microbatch, mjit

pytestmark = pytest.mark.core

NUM_LAYERS, WIDTH, ROWS = 4, 4, 8


def make_multi_mesh(num_stages):
    multi_mesh = MultiMesh(
        axis_sizes=(num_stages, 1),
        axis_names=("stage", "data"),
        devices=jax.devices()[:num_stages],
    )
    multi_mesh.register_layers("layer", num_layers=NUM_LAYERS, scanned=True)
    return multi_mesh


def loss(weights, x):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), jnp.sum(x)

    x, sums = lax.scan(layer, x, weights)
    return jnp.mean(jnp.square(x - 1)) + 1e-3 * jnp.sum(sums)


def make_step(function, size, schedule):
    grad_fn = jax.value_and_grad(function)
    if size:
        grad_fn = microbatch(grad_fn, 0, size, argnum=1, schedule=schedule)

    def step(weights, x):
        value, grads = grad_fn(weights, x)
        return weights - 0.1 * grads, value

    return step


def data():
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((NUM_LAYERS, WIDTH, WIDTH), np.float32)
    return weights, draw.standard_normal((ROWS, WIDTH), np.float32)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("size", "schedule"), [(0, None), (2, "1f1b"), (1, "zb-h1")])
def test_layers_of_a_scan_train_on_their_submeshes(num_stages, remat, size, schedule):
    step = make_step(jax.checkpoint(loss) if remat else loss, size, schedule)
    weights, x = data()
    with make_multi_mesh(num_stages):
        ours = mjit(step)
    report = ours.lower(weights, x).explain()
    places = {task.submesh for task in report.tasks if task.name.startswith("layer_")}
    assert places == {f"stage={stage}" for stage in range(num_stages)}

    plain = jax.jit(step)
    ours_w = plain_w = weights
    for _ in range(3):
        ours_w, value = ours(ours_w, x)
        plain_w, expected = plain(plain_w, x)
    np.testing.assert_array_max_ulp(np.asarray(value), np.asarray(expected), 8)
    np.testing.assert_allclose(ours_w, plain_w, rtol=0, atol=1e-6)


def test_a_microbatch_loop_around_the_scan_is_scheduled():
    weights, x = data()
    with make_multi_mesh(2):
        step = mjit(make_step(loss, 2, "1f1b"))
    (loop,) = step.lower(weights, x).explain().loops
    assert loop.simulation is not None and loop.simulation.schedule.name == "1f1b"


def test_backward_iterations_have_the_numbers_of_the_forward_ones():
    names = []

    def callback(name, backprop):
        names.append((name, backprop))
        return Task(name=name, mesh_slice={"stage": int(name.split("_")[1]) // 2})

    multi_mesh = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi_mesh.register_task("layer", callback=callback, scanned=True)
    weights, x = data()
    with multi_mesh:
        mjit(make_step(loss, 0, None)).lower(weights, x)
    layers = {f"layer_{i}" for i in range(NUM_LAYERS)}
    assert {name for name, backprop in names if backprop} == layers
    assert {name for name, backprop in names if not backprop} == layers


@pytest.mark.parametrize("order", [(1, 3, 0), (3, 2, 1, 0), (1, 1, 0, 0), (2, 0, 2, 0)])
@pytest.mark.parametrize("width", [2, WIDTH, 32])
@pytest.mark.parametrize("what", ["results", "gradients", "both"])
def test_rows_that_only_others_read_stay_where_the_stack_has_them(order, width, what):
    """Layers stand in another order than the stages, one row or two of the stack on each."""
    multi_mesh = MultiMesh(
        axis_sizes=(4, 1), axis_names=("stage", "data"), devices=jax.devices()[:4]
    )
    multi_mesh.register_task(
        "layer",
        callback=lambda name, _: Task(mesh_slice={"stage": order[int(name[6:])]}),
        scanned=True,
    )

    def forward(stacks, x):
        def layer(x, row):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ row[0]) * (1 + row[1].sum()), row[1] * x.sum()

        return lax.scan(layer, x, stacks)

    def summed(stacks, x):
        return jnp.square(forward(stacks, x)[0]).sum()

    step = {
        "results": forward,
        "gradients": jax.grad(summed),
        "both": lambda stacks, x: (jax.value_and_grad(summed)(stacks, x), forward(stacks, x)[1]),
    }[what]
    draw = np.random.RandomState(0)
    stacks = [draw.randn(len(order), WIDTH, WIDTH), draw.randn(len(order), width)]
    args = [stack.astype("float32") / 2 for stack in stacks], np.ones((ROWS, WIDTH), "float32")
    with multi_mesh:
        ours = mjit(step)(*args)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        size = np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * size)
