"""Manual axes: inside `shard_map`, types say along which mesh axes a value differs.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1 (`manual_axis_type` of avals and of ShapeDtypeStruct).
Without it constants are left as they are, and JAX says where a `jax.lax.pcast` is missing.
"""

from typing import Any

import jax


def as_varying(x: Any, like: Any) -> Any:
    """Returns a constant `x` with the type that `like` has along the manual axes."""
    axes = _varying(like) - _varying(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _varying(typed: Any) -> frozenset[str]:
    return getattr(getattr(typed, "manual_axis_type", None), "varying", frozenset())
