"""MultiMesh contexts for MPMD: an unmodified model on two submeshes.

Run it with `python examples/tutorial_mpmd.py`; it makes 8 CPU devices. It prints where the two
parameters lie, calls the sharded model and checks the result against plain `jax.jit`.
"""

# Initialize MultiMesh, before JAX is imported.
from jax_plugins.multimesh import init

init(cpus=8)

# A standard set of JAX imports.
import re  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.debug import visualize_array_sharding  # noqa: E402
from jax.sharding import Mesh, PartitionSpec as P  # noqa: E402

from multimesh.jax import MultiMesh, Task, parallelize, with_sharding_constraint  # noqa: E402

# The model. Tensor axes have names ("batch", "model"); layers have named scopes. Nothing here says
# on which devices it runs.


def f(param, x):
    return jnp.einsum("bm,mh->bh", x, param)


def model(params, x):
    x = with_sharding_constraint(x, P("batch", None))
    param_1, param_2 = params
    param_1 = with_sharding_constraint(param_1, P("model", None))
    param_2 = with_sharding_constraint(param_2, P(None, "model"))
    with jax.named_scope("layer0"):
        x = f(param_1, x)
    with jax.named_scope("layer1"):
        x = f(param_2, x)
        return with_sharding_constraint(x, P("batch", None))


def get_input_batch():
    return jnp.arange(64).reshape(8, 8)


def init_params():
    param1 = jnp.arange(64).reshape(8, 8)
    param2 = jnp.arange(64).reshape(8, 8)
    return param1, param2


# The global mesh has a "stage" axis that is sliced to make pipeline stages.
global_mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "batch", "model"))
multi_mesh = MultiMesh(global_mesh=global_mesh)


# One callback for all layers: each is a task on its slice of the global mesh.
def callback(name: str, backprop: bool):
    layer = int(re.compile(r"layer(\d+)").search(name).groups()[0])
    suffix = "bwd" if backprop else "fwd"
    full_name = f"layer{layer}_" + suffix
    return Task(
        name=full_name,
        mesh_slice={"stage": layer},
    )


multi_mesh.register_task(
    r"layer\d+",
    callback=callback,
)

with multi_mesh:
    sharded_model, init_sharded_params, get_sharded_batch = parallelize(
        model, init_params=init_params, get_input_batch=get_input_batch
    )

# Parameter 1 lies on the submesh of stage 0, parameter 2 on that of stage 1.
param_1, param_2 = init_sharded_params()
print("Param 1")
visualize_array_sharding(param_1, use_color=False)
print("Param 2")
visualize_array_sharding(param_2, use_color=False)

# The sharded model gives what plain JAX gives. (Plain JAX takes the names for axes of one mesh.)
result = sharded_model((param_1, param_2), get_sharded_batch())
with jax.set_mesh(global_mesh):
    expected = jax.jit(model)(init_params(), get_input_batch())
np.testing.assert_array_equal(result, expected)
print(f"The result, on {result.sharding.mesh.devices.ravel().tolist()}, equals plain jax.jit's.")
