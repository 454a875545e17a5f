"""Takes a task's body to its submesh: sharding constraints (R6) and the meshes of `shard_map`s."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from multimesh._src.errors import PartitionError, ShardingError, message
from multimesh._src.frontend.logical import resolve_constraint, same_mesh
from multimesh._src.ir.constraint import map_constraints
from multimesh._src.ir.memory import memory_kinds
from multimesh._src.jax_compat import name_stack, shard_maps
from multimesh._src.jax_compat.shard_maps import LentMesh
from multimesh._src.topology import devices_label


def resolve_constraints(
    body: ClosedJaxpr,
    pairs: Sequence[tuple[str, str]],
    mesh: Mesh,
    task: str,
) -> ClosedJaxpr:
    """Returns `body` with every constraint resolved by the logical axes of its task.

    Raises:
        ShardingError: A constraint does not fit the submesh or its devices.
    """
    axis_sizes = dict(mesh.shape)

    def resolve(eqn: Any) -> Mapping[str, Any]:
        line = name_stack.source_line(eqn)
        where = f"{task}, {line}" if line else task
        _check_place(eqn.params["mesh"], mesh, where)
        _check_memory(eqn.params["memory_kind"], mesh, where)
        return resolve_constraint(
            eqn.params, eqn.invars[0].aval.shape, pairs, axis_sizes, where=where
        )

    return map_constraints(body, resolve)


def _check_place(wanted: Mesh | None, mesh: Mesh, where: str) -> None:
    if wanted is not None and not same_mesh(wanted, mesh):
        devices = devices_label(list(wanted.devices.flat))
        raise ShardingError(
            message(
                f"a value inside a branch or a loop is put on {devices}, but the whole of it runs "
                f"on {devices_label(list(mesh.devices.flat))}.",
                where=where,
                ways=("put the value there before the branch or loop, or after it",),
            )
        )


def _check_memory(kind: str | None, mesh: Mesh, where: str) -> None:
    if kind is None:
        return
    known = memory_kinds(mesh.devices.flat[0])
    if kind not in known:
        kinds = ", ".join(f"`{known_kind}`" for known_kind in known)
        raise ShardingError(
            message(
                f"the devices of the submesh have no memory of kind `{kind}`; theirs are {kinds}.",
                where=where,
                ways=("name one of these kinds", "leave the memory kind out: the default memory"),
            )
        )


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
