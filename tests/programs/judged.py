"""Judges a small hand-written program by R1, gradients and several steps included.

judge_steps(pipeline(2), step, params, batch)      # params, other = step(params, batch)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.runtime import counters
from multimesh._src.staging.mjit import mjit
from tests.oracle import Oracle, compare
from tests.programs.plainly import sgd

Tree = Any


def train(loss: Callable[[Tree, Tree], Any], size: int = 2, **options: Any) -> Callable[..., Any]:
    """A step of gradient descent, in microbatches of `size` rows; 0 takes the batch at once."""

    def step(params: Tree, batch: Tree) -> tuple[Tree, Any]:
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, **options)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


def loss_of(model: Callable[[Tree, Any], Any]) -> Callable[[Tree, Tree], Any]:
    """The mean square error of a model."""
    return lambda params, batch: jnp.mean((model(params, batch[0]) - batch[1]) ** 2)


def judge(multi: MultiMesh, function: Callable[..., Tree], *args: Tree, **options: Any) -> Any:
    """Runs `function` once as ours and as the references; returns what was staged."""
    with multi:
        staged = mjit(function, **options)
    found = [jax.jit(function)(*copy) for copy in (args, _replicated(multi, args))]
    exact = Oracle(function, *args)(*args)
    compare(staged(*args), *found, exact).check()
    return staged


def judge_steps(
    multi: MultiMesh, step: Callable[..., Tree], state: Tree, *rest: Tree, steps: int = 5
) -> Any:
    """Runs `state, other = step(state, *rest)` several times, ours with the state donated.

    Applies R1 after the first and after the last step, and checks that later steps compile nothing;
    returns what was staged.
    """
    with multi:
        staged = mjit(step, donate_argnums=0)
    ours = _run(staged, jax.tree.map(jnp.array, state), rest, steps)
    found = [_run(jax.jit(step), *copy, steps) for copy in _copies(multi, state, rest)]
    exact = _run(Oracle(step, state, *rest), state, rest, steps)
    for results in zip(ours, *found, exact, strict=True):
        compare(*results).check()
    return staged


def _run(step: Callable[..., Tree], state: Tree, rest: tuple[Tree, ...], steps: int) -> list[Tree]:
    """The results of the first and of the last step, on the host."""
    results: list[Tree] = []
    compiles = 0
    for number in range(steps):
        last = step(state, *rest)
        state = last[0]
        results.append(jax.tree.map(_on_host, last))
        new = counters.snapshot().compiles
        assert number < 2 or new == compiles, "a later step compiles"
        compiles = new
    return [results[0], results[-1]]


def _copies(multi: MultiMesh, state: Tree, rest: tuple[Tree, ...]) -> list[tuple[Tree, Tree]]:
    return [(state, rest), (_replicated(multi, state), _replicated(multi, rest))]


def _replicated(multi: MultiMesh, tree: Tree) -> Tree:
    """The arrays on a mesh of the shape of one submesh."""
    whole = multi.global_mesh
    devices = whole.devices[:1]
    mesh = Mesh(devices, whole.axis_names)
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec())), tree)


def _on_host(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            np.asarray(jax.random.key_data(array)), impl=jax.random.key_impl(array)
        )
    return np.array(array)
