"""Tasks whose submesh depends on the microbatch (`loop_dependent_mesh_slice`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import MultiMesh, Task, microbatch, mjit
from multimesh.jax.errors import MatchError

pytestmark = pytest.mark.core

WIDTH, ROWS = 4, 8


def make_multi_mesh(num_stages, num_data, place=None):
    multi_mesh = MultiMesh(
        axis_sizes=(num_stages, num_data),
        axis_names=("stage", "data"),
        devices=jax.devices()[: num_stages * num_data],
    )
    multi_mesh.register_task(
        r"layer\d",
        callback=lambda name, backprop: Task(
            name=name + ("_bwd" if backprop else ""), mesh_slice={"stage": int(name[5:])}
        ),
    )
    place = place or (lambda i: {"stage": i % num_stages})
    multi_mesh.register_task(
        "embed",
        callback=lambda name, backprop: Task(
            name=name + ("_bwd" if backprop else ""), loop_dependent_mesh_slice=place
        ),
    )
    return multi_mesh


def make_step(num_stages, schedule, size=1):
    def loss(params, batch):
        x, y = batch
        with jax.named_scope("embed"):
            x = jnp.sin(x @ params[0])
        for stage in range(num_stages):
            with jax.named_scope(f"layer{stage}"):
                x = jnp.tanh(x @ params[1])
        return jnp.mean(jnp.square(x - y))

    def step(params, batch):
        grad_fn = microbatch(jax.value_and_grad(loss), 0, size, argnum=1, schedule=schedule)
        value, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step


def data():
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(2)]
    return params, (np.ones((ROWS, WIDTH), np.float32), np.zeros((ROWS, WIDTH), np.float32))


@pytest.mark.parametrize(("num_stages", "num_data"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_rotating_task_trains_as_in_plain_jax(num_stages, num_data, schedule):
    step = make_step(num_stages, schedule)
    params, batch = data()
    with make_multi_mesh(num_stages, num_data):
        ours = mjit(step)
    plain = jax.jit(step)
    ours_p = plain_p = params
    for _ in range(3):
        ours_p, value = ours(ours_p, batch)
        plain_p, expected = plain(plain_p, batch)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    for mine, theirs in zip(ours_p, plain_p, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)


def test_it_runs_everywhere_and_its_accumulators_stay():
    params, batch = data()
    with make_multi_mesh(2, 1):
        report = mjit(make_step(2, "1f1b")).lower(params, batch).explain()
    runs = {(t.name, t.submesh): t.num_runs for t in report.tasks if t.name.startswith("embed")}
    for name in ("embed", "embed_bwd"):
        assert runs[name, "stage=0"] == runs[name, "stage=1"] == ROWS // 2
    # one partial gradient crosses a step, not one in every microbatch
    gradients = [r for r in report.reshards if r.type == f"float32[{WIDTH},{WIDTH}]"]
    assert all(r.copies == 1 for r in gradients)


def test_submeshes_of_unlike_axes_are_an_error():
    params, batch = data()
    unlike = make_multi_mesh(2, 1, lambda i: {"stage": 0} if i % 2 else {})
    with unlike:
        step = mjit(make_step(2, "1f1b"))
    with pytest.raises(MatchError, match="task `embed` rotates over submeshes of unlike axes"):
        step(params, batch)


@pytest.mark.parametrize("around", [jax.checkpoint, lambda fun: fun])
def test_a_rotating_layer_of_a_scan_may_be_recomputed(around):
    """The place of a remat region depends on the iteration as what is inside it does."""
    multi_mesh = make_multi_mesh(2, 1)

    @around
    def body(x, w):
        with jax.named_scope("embed"):
            return jnp.tanh(x @ w), None

    def loss(weights, x):
        return jnp.square(jax.lax.scan(body, x, weights)[0]).sum()

    weights = np.random.RandomState(0).randn(4, WIDTH, WIDTH).astype("float32")
    x = np.random.RandomState(1).randn(ROWS, WIDTH).astype("float32")
    with multi_mesh:
        ours = mjit(jax.value_and_grad(loss))(weights, x)
    expected = jax.jit(jax.value_and_grad(loss))(weights, x)
    for got, want in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_loop_of_rotating_tasks_alone_has_no_ranks():
    multi_mesh = make_multi_mesh(2, 1)

    def loss(w, x):
        with jax.named_scope("embed"):
            return jnp.square(jnp.tanh(x @ w)).sum()

    step = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)
    w = np.eye(WIDTH, dtype=np.float32)
    x = np.random.RandomState(1).randn(ROWS, WIDTH).astype("float32")
    with multi_mesh:
        ours = mjit(step)(w, x)
    for got, want in zip(ours, jax.jit(step)(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_a_rotating_layer_of_a_scan_inside_a_microbatch(microbatch_size):
    """It rotates with the scan; what reads its results in the outer loop does not."""

    def loss(params, x):
        def body(h, _):
            with jax.named_scope("embed"):
                return jnp.sin(jnp.tanh(h @ params[0])), None

        x, _ = jax.lax.scan(body, x, None, length=3)
        for stage in range(2):
            with jax.named_scope(f"layer{stage}"):
                x = jnp.tanh(x @ params[1])
        return x.sum()

    step = microbatch(jax.value_and_grad(loss), 0, microbatch_size, argnum=1)
    params, (x, _) = data()
    with make_multi_mesh(2, 1):
        staged = mjit(step)
    ours, expected = staged(params, x), jax.jit(step)(params, x)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    places = {task.submesh for task in staged.lower(params, x).explain().tasks}
    assert "rotating" not in " ".join(places)
