"""A training step of two layers on two submeshes, for the tests of reports.

Texts of reports name lines of this file, so it is apart from the tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, Task, microbatch


def make_multi_mesh() -> MultiMesh:
    """Two stages of one device each."""
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("stage", "data"))
    multi_mesh = MultiMesh(global_mesh=mesh)

    def layer(name, backprop):
        suffix = "_bwd" if backprop else "_fwd"
        return Task(name=name + suffix, mesh_slice={"stage": int(name[5:])})

    multi_mesh.register_task(r"layer\d+", callback=layer)
    return multi_mesh


def loss(params, batch):
    x, y = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = x @ w
    return jnp.sum(x * y)


def step(params, batch):
    value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)
    return [p - g for p, g in zip(params, grads, strict=True)], value


PARAMS = [np.ones((4, 4), np.float32)] * 2
BATCH = (np.ones((6, 4), np.float32), np.ones((6, 4), np.float32))
