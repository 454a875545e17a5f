"""MultiMesh for JAX: pipeline parallelism for ordinary JAX programs.

This package never imports JAX: `multimesh.jax` is the public API, `import jax` still means JAX.
"""

__version__ = "0.1.0"
