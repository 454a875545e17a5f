"""For Flax NNX: named scopes around the calls of modules."""

try:
    from multimesh._src.integrations.nnx import scopes as scopes
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"`multimesh.jax.nnx` needs `{error.name}`: `pip install 'multimesh-jax[flax]'`."
    ) from error
