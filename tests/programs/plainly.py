"""Runs a small hand-written program as ours and under plain `jax.jit`, and compares."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task
from multimesh._src.staging.mjit import mjit

Tree = Any


def pipeline(
    num_stages: int, width: int = 1, *, give_stages: int = 0, halves: bool = False
) -> MultiMesh:
    """A MultiMesh on which `layer<i>` runs on `stage = i % num_stages`, of `width` devices each.

    With `give_stages`, layer i also says `Task.stage = i % give_stages`; with `halves`, tasks say
    that their backward may be split.
    """
    devices = np.array(jax.devices()[: num_stages * width]).reshape(num_stages, width)
    multi = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))

    def of_layer(name: str, backprop: bool) -> Task:
        layer = int(name.removeprefix("layer"))
        return Task(
            name=name + ("_bwd" if backprop else "_fwd"),
            mesh_slice={"stage": layer % num_stages},
            stage=layer % give_stages if give_stages else None,
            split_backprop=("_dx", "_dw") if halves else None,
        )

    multi.register_task(r"layer\d+", callback=of_layer)
    multi.register_task(r"whole", callback=lambda name, backprop: Task(name=name, mesh_slice={}))
    return multi


def check(multi: MultiMesh, step: Callable[..., Tree], *args: Tree, **options: Any) -> Any:
    """Runs `step` once as ours and once plainly; returns our results after comparing them."""
    with multi:
        staged = mjit(step, **options)
    expected = jax.jit(step)(*args)
    ours = staged(*args)
    assert_close(ours, expected)
    return ours


def check_steps(
    multi: MultiMesh, step: Callable[..., Tree], state: Tree, *rest: Tree, steps: int = 3
) -> None:
    """Runs `state, other = step(state, *rest)` several times, donating the state to ours."""
    with multi:
        staged = mjit(step, donate_argnums=0)
    plain = jax.jit(step)
    ours, expected = jax.tree.map(jnp.array, state), state
    for _ in range(steps):
        ours, other = staged(ours, *rest)
        expected, expected_other = plain(expected, *rest)
        assert_close((ours, other), (expected, expected_other))


def assert_close(ours: Tree, expected: Tree) -> None:
    """Same trees and types; integers, keys and booleans equal, floats close."""
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    named = jax.tree_util.tree_leaves_with_path(ours)
    for (path, got), want in zip(named, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        assert got.aval.weak_type == want.aval.weak_type, name
        if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        got, want = np.asarray(got), np.asarray(want)
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            np.testing.assert_array_equal(got, want, err_msg=name)
            continue
        size = np.max(np.abs(want.astype("float64")), initial=1e-3)
        tolerance = 128 * float(jnp.finfo(want.dtype).eps) * size
        np.testing.assert_allclose(
            got.astype("float64"), want.astype("float64"), rtol=0, atol=tolerance, err_msg=name
        )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def weights(num: int, width: int = 4) -> list[np.ndarray]:
    """Square matrices."""
    return [normal(width, width, seed=n + 1) / 2 for n in range(num)]


def layer(index: int) -> Any:
    """The scope of layer `index`."""
    return jax.named_scope(f"layer{index}")


def mlp(params: Any, x: Any) -> Any:
    """One tanh layer per parameter, layer i in scope `layer<i>`."""
    for index, w in enumerate(params):
        with layer(index):
            x = jnp.tanh(x @ w)
    return x


def square_loss(params: Any, batch: Any) -> Any:
    """Mean square of the `mlp`'s error on `(x, y)`."""
    x, y = batch
    return jnp.mean((mlp(params, x) - y) ** 2)


def sgd(params: Tree, grads: Tree) -> Tree:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
