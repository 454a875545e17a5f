"""Runs a hand-written program as ours and plainly, and compares by R1."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from multimesh.jax import MultiMesh, Task, mjit
from tests.oracle import Oracle, compare
from tests.programs.plainly import layer, normal

Tree = Any

NAMES = ("stage", "data", "model")


def make_mesh(sizes: tuple[int, ...] = (2, 2, 2), explicit: bool = False) -> Mesh:
    """A global mesh with the axes stage, data and model."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, NAMES, axis_types=(kind,) * 3)


def make_multi(mesh: Mesh, place: Callable[[int], dict[str, Any]] | None = None) -> MultiMesh:
    """`layer<i>` runs on the slice stage=i, or where `place(i)` says; `whole` on all devices."""
    multi = MultiMesh(global_mesh=mesh)

    def of_layer(name: str, backprop: bool) -> Task:
        index = int(name.removeprefix("layer"))
        given = {"mesh_slice": {"stage": index % mesh.shape["stage"]}}
        suffix = "_bwd" if backprop else ""
        return Task(name=name + suffix, **(place(index) if place else given))

    multi.register_task(r"layer\d+", callback=of_layer)
    multi.register_task(r"whole", callback=lambda name, backprop: Task(name=name, mesh_slice={}))
    return multi


def weights(num: int = 2, width: int = 4) -> list[np.ndarray]:
    """Square matrices."""
    return [normal(width, width, seed=n + 1) / 3 for n in range(num)]


X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


def make_step(
    block: Callable[..., Any], wrap: Callable[..., Any] = lambda grad: grad
) -> Callable[..., Any]:
    """A train step: `x = block(w, x)` in scope `layer<i>` for each weight."""

    def loss(params: Tree, batch: Tree) -> Any:
        x, y = batch
        for index, w in enumerate(params):
            with layer(index):
                x = block(w, x)
        return jnp.mean((x - y) ** 2)

    def step(params: Tree, batch: Tree) -> tuple[Tree, Any]:
        value, grads = wrap(jax.value_and_grad(loss))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def check(
    multi: MultiMesh,
    step: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    *batch: Tree,
    steps: int = 2,
    plain: Mesh | None = None,
    reference: Callable[..., tuple[Tree, Tree]] | None = None,
) -> Any:
    """Runs `state, other = step(state, *batch)` several times, and applies R1 after each.

    Args:
        multi: The MultiMesh with its tasks.
        step: The program.
        state: Its first argument, donated to ours.
        *batch: The others.
        steps: How often.
        plain: The mesh that is set for the plain run.
        reference: The plain program, if it is another one.

    Returns:
        Ours, compiled.
    """
    with multi:
        compiled = mjit(step, donate_argnums=0).lower(state, *batch).compile()
    reference = step if reference is None else reference
    with jax.set_mesh(plain) if plain else contextlib.nullcontext():
        oracle, jitted = Oracle(reference, state, *batch), jax.jit(reference)
        ours = expected = exact = state
        for _ in range(steps):
            expected, other = jitted(expected, *batch)
            exact, exact_other = oracle(exact, *batch)
            ours, our_other = compiled(ours, *batch)
            results = (ours, our_other), (expected, other)
            compare(*map(_on_host, (*results, results[1])), (exact, exact_other)).check()
    return compiled


def submeshes_of(compiled: Any) -> set[str]:
    """The labels of the submeshes on which tasks run."""
    return {task.submesh for task in compiled.program.tasks}


def _on_host(tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, tree)
