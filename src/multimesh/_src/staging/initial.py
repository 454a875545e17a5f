"""Functions that only make arrays: `mjit(init, out_shardings=places on several submeshes)`.

Nothing says where their code runs but the places of the results, and no argument lies anywhere.
They are cut backwards from the results: one program for each device set, which computes what its
results need and nothing else. What several of them need is computed by each.

    init(key) -> (w0 on stage=0, w1 on stage=1)
    ->  stage=0: init(key)[0]     stage=1: init(key)[1]

So no device holds what it does not own, and random bits are those of the un-cut function.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding

from multimesh._src.frontend.tracing import TracedFunction, plain_aval
from multimesh._src.ir.submesh import auto_mesh
from multimesh._src.jax_compat.avals import no_ambient_mesh
from multimesh._src.runtime.compile import lower_flat
from multimesh._src.runtime.counters import counters
from multimesh._src.staging.staged import PiecesBackend


def is_cut_by_results(traced: TracedFunction) -> bool:
    """Whether the results alone say where a function runs."""
    if any(argument.placement is not None for argument in traced.arguments):
        return False
    return bool(traced.results) and all(r.sharding is not None for r in traced.results)


def cut_by_results(traced: TracedFunction) -> PiecesBackend:
    """Compiles one program for each device set of the results."""
    groups: dict[Any, list[int]] = {}
    shardings: tuple[Any, ...] = tuple(result.sharding for result in traced.results)
    for i, sharding in enumerate(shardings):
        groups.setdefault(tuple(sharding.mesh.devices.flat), []).append(i)
    pieces = tuple((_compile(traced, group), tuple(group)) for group in groups.values())
    return PiecesBackend(pieces, shardings, len(traced.arguments))


def _compile(traced: TracedFunction, group: Sequence[int]) -> jax.stages.Compiled:
    evaluate = jaxpr_as_fun(traced.jaxpr)
    shardings: list[Any] = [traced.results[i].sharding for i in group]
    mesh = auto_mesh(shardings[0].mesh)
    replicated = NamedSharding(mesh, jax.sharding.PartitionSpec())

    def piece(*args: Any) -> list[Any]:
        results = evaluate(*args)
        return [results[i] for i in group]

    avals = [plain_aval(argument.aval) for argument in traced.arguments]
    with no_ambient_mesh():
        lowered = lower_flat(piece, traced.name, avals, [replicated] * len(avals), shardings)
        compiled = lowered.compile()
    counters.compiles += 1
    return compiled
