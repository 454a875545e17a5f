"""A pipelined MLP with adamw and clipping, for the tests of the main road."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, Task, microbatch

WIDTH = 32
NUM_MICROBATCHES = 8
BATCH = (np.ones((16, WIDTH), np.float32), np.zeros((16, WIDTH), np.float32))

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_multi_mesh(
    num_stages: int = 2, layers_per_stage: int = 2, explicit: bool = False
) -> MultiMesh:
    """Stages of `8 / num_stages` devices on a data axis."""
    sizes, names = (num_stages, 8 // num_stages), ("stage", "data")
    if explicit:
        mesh = jax.make_mesh(sizes, names)
    else:
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), names)
    multi_mesh = MultiMesh(global_mesh=mesh)

    def layer(name: str, backprop: bool) -> Task:
        suffix = "_bwd" if backprop else "_fwd"
        return Task(
            name=f"layer{name}{suffix}", mesh_slice={"stage": int(name) // layers_per_stage}
        )

    multi_mesh.register_task(r"layer(\d+)", callback=layer)
    return multi_mesh


def make_params(num_layers: int = 4) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), num_layers)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]


def make_state(num_layers: int = 4):
    params = make_params(num_layers)
    return params, optimizer.init(params)


def loss(params, batch):
    x, y = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def step(state, batch, num_microbatches=NUM_MICROBATCHES):
    params, opt_state = state
    size = BATCH[0].shape[0] // num_microbatches
    gradient = microbatch(jax.value_and_grad(loss), 0, size, argnum=1, reduce="mean")
    value, grads = gradient(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value
