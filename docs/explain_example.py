"""The program of docs/explain.md. Run it to see the whole text."""

from jax_plugins.multimesh import init

init(cpus=8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from multimesh.jax import MultiMesh, Task, microbatch, mjit  # noqa: E402


def model(params, tokens):
    with jax.named_scope("embed"):
        x = params["table"][tokens]
    for i, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer{i}"):
            x = x * (x @ w)
    return x @ params["table"].T  # in no scope, and of the same table


def loss(params, batch):
    wanted = jax.nn.one_hot(batch["next"], 64)
    return jnp.square(model(params, batch["tokens"]) - wanted).mean()


def step(params, batch):
    value, grads = microbatch(jax.value_and_grad(loss), 0, 8, argnum=1, reduce="mean")(
        params, batch
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def explained():
    """The report of the step on four stages of two devices, of which two are used."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data"))
    multi_mesh = MultiMesh(global_mesh=mesh, schedule="1f1b")
    multi_mesh.register_task("embed", task=Task(mesh_slice={"stage": 0}))
    multi_mesh.register_layers(r"layer\d+", num_layers=4, layers_per_stage=(2, 2, 0, 0))
    multi_mesh.register_task("decoder", task=Task(mesh_slice={"stage": 3}))
    params = {"table": np.ones((64, 16), np.float32), "layers": [np.eye(16, dtype=np.float32)] * 4}
    batch = {name: np.zeros((32, 4), np.int32) for name in ("tokens", "next")}
    with multi_mesh:
        return mjit(step, donate_argnums=0).lower(params, batch).explain()


if __name__ == "__main__":
    print(explained())
