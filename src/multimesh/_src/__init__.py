"""Everything that does something. Private: import from `multimesh.jax` instead."""
