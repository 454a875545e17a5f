"""A small model over stages, and comparison with plain JAX (R1), for the tests of staging."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, Task
from tests import oracle

WIDTH = 16


def make_multi_mesh(explicit: bool = False, layers_per_stage: int = 2) -> MultiMesh:
    """(stage 2, data 2, model 2) with `layer<i>` on stage `i // layers_per_stage`."""
    names, sizes = ("stage", "data", "model"), (2, 2, 2)
    if explicit:
        mesh = jax.make_mesh(sizes, names)
    else:
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), names)
    multi_mesh = MultiMesh(global_mesh=mesh)

    def layer(name: str, backprop: bool) -> Task:
        stage = int(name) // layers_per_stage
        return Task(name=f"{name}{'b' if backprop else 'f'}", mesh_slice={"stage": stage})

    multi_mesh.register_task(r"layer(\d+)", callback=layer)
    return multi_mesh


def make_params(num_layers: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    keys = jax.random.split(jax.random.key(seed), num_layers)
    return [
        {"b": jnp.zeros(WIDTH), "w": jax.random.normal(key, (WIDTH, WIDTH)) / 4} for key in keys
    ]


def make_state(num_layers: int = 4) -> dict[str, Any]:
    params = make_params(num_layers)
    return {
        "count": jnp.int32(0),
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "params": params,
    }


def make_batches(number: int, rows: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (rows, WIDTH)
    return [
        (rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32))
        for _ in range(number)
    ]


def loss(params: Any, x: Any, y: Any) -> Any:
    for i, layer in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    value, grads = jax.value_and_grad(loss)(state["params"], *batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"count": state["count"] + 1, "momentum": momentum, "params": params}, value


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def devices_of(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(sorted(d.id for d in x.sharding.device_set)) for x in jax.tree.leaves(tree)]


def compare_once(ours: Any, fun: Callable[..., Any], mesh: Mesh, *args: Any) -> None:
    """Compares results of `fun(*args)` with both references and the oracle (R1)."""
    args = jax.tree.map(lambda x: np.asarray(x) if not _is_key(x) else x, args)
    reference_a = oracle.reference_a(fun, *args)
    reference_b = oracle.reference_b(fun, mesh, args)
    truth = oracle.Oracle(fun, *args)(*args)
    oracle.compare(ours, reference_a, reference_b, truth).check()


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def repeated(step: Callable[..., Any], num_steps: int) -> Callable[..., Any]:
    """Returns a function of (state, batches) that runs steps one after another."""

    def run(state: Any, batches: Sequence[Any]) -> Any:
        results = []
        for batch in batches[:num_steps]:
            state, result = step(state, batch)
            results.append(result)
        return state, results

    return run
