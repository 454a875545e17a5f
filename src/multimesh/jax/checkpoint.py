"""Checkpoints of states that lie on several submeshes, by Orbax (extra `multimesh-jax[orbax]`)."""

from multimesh._src.integrations.checkpoint import (
    abstract_state as abstract_state,
    restore as restore,
    save as save,
)

__all__ = ["abstract_state", "restore", "save"]
