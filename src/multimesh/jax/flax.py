"""For Flax Linen: modules as tasks, kernels with axis names, a whole training step."""

from multimesh._src.frontend.logical import with_sharding_constraint as with_sharding_constraint

try:
    from multimesh._src.integrations.flax import (
        parallelize_step as parallelize_step,
        shard_axes as shard_axes,
        task as task,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`multimesh.jax.flax` needs `{error.name}`: `pip install 'multimesh-jax[flax]'`."
    ) from error
