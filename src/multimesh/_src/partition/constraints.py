"""Takes a task's body to its submesh: sharding constraints (R6) and the meshes of `shard_map`s."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from multimesh._src.errors import PartitionError, message
from multimesh._src.frontend.logical import resolve_constraint
from multimesh._src.ir.constraint import map_constraints
from multimesh._src.jax_compat import name_stack, shard_maps
from multimesh._src.jax_compat.shard_maps import LentMesh


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


def place_shard_maps(body: ClosedJaxpr, axis_sizes: Mapping[str, int], task: str) -> ClosedJaxpr:
    """Returns `body` with every `shard_map` on the submesh of its task.

    Raises:
        PartitionError: One was traced on other axes than those of the submesh.
    """

    def check(lent: LentMesh) -> None:
        if dict(lent.shape) != dict(axis_sizes):
            raise PartitionError(
                message(
                    f"a `shard_map` was traced on `{lent.label}` with axes `{dict(lent.shape)}`, "
                    f"but {task} runs on axes `{dict(axis_sizes)}`.",
                    where=lent.line,
                    ways=("let all `shard_map`s of one `cond` or `while` have the same mesh.",),
                )
            )

    return shard_maps.on_submesh(body, check)
