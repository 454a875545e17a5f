"""Resolves the sharding constraints in a task's body to axes of its submesh (R6)."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from multimesh._src.frontend.logical import resolve_constraint
from multimesh._src.ir.constraint import map_constraints
from multimesh._src.jax_compat import name_stack


def resolve_constraints(
    body: ClosedJaxpr,
    pairs: Sequence[tuple[str, str]],
    axis_sizes: Mapping[str, int],
    task: str,
) -> ClosedJaxpr:
    """Returns `body` with every constraint resolved by the logical axes of its task."""

    def resolve(eqn: Any) -> Mapping[str, Any]:
        line = name_stack.source_line(eqn)
        where = f"{task}, {line}" if line else task
        return resolve_constraint(
            eqn.params, eqn.invars[0].aval.shape, pairs, axis_sizes, where=where
        )

    return map_constraints(body, resolve)
