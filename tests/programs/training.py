"""Trains a hand-written program for several steps and compares each step by R1.

    program = train(pipeline(2), step, state, batches)      # state, aux = step(state, batch)

The step runs as ours with its state donated, plainly on one device, plainly on a mesh of one
submesh's shape, and in float64. Later steps must not trace, compile or move anything that the
plain one would not; the report of the program comes back, for what tests say of places and traffic.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.report.program import ProgramReport
from multimesh._src.runtime import counters
from multimesh._src.staging.mjit import mjit
from tests.oracle import Oracle, compare

Tree: TypeAlias = Any
Step: TypeAlias = Callable[[Tree, Tree], tuple[Tree, Tree]]


def train(multi: MultiMesh, step: Step, state: Tree, batches: Sequence[Tree]) -> ProgramReport:
    """Runs `state, aux = step(state, batch)` on every batch and compares all results by R1."""
    plain = jax.jit(step)
    in_one_place = _run(plain, jax.device_put(state, jax.devices()[0]), batches)
    on_mesh = _on_a_submesh(multi, plain, state, batches, in_one_place)
    exact = _run(Oracle(step, state, batches[0]), state, batches)
    ours, program = _ours(multi, step, state, batches, plain)
    for results in zip(ours, in_one_place, on_mesh, exact, strict=True):
        compare(*results).check()
    return program


def crossings(program: ProgramReport) -> dict[tuple[str, str], int]:
    """Copies a step by edge and type, without views of what is there already."""
    found: dict[tuple[str, str], int] = {}
    for reshard in program.reshards:
        if reshard.bytes:
            key = reshard.edge, reshard.type
            found[key] = found.get(key, 0) + reshard.copies
    return found


def check_once(program: ProgramReport, step_name: str = "") -> None:
    """No value crosses twice to the same place: more often than its maker runs."""
    runs = {task.label: task.num_runs for task in program.tasks}
    count: dict[tuple[str, str], int] = {}
    for reshard in program.reshards:
        key = reshard.value, reshard.edge.split(" -> ")[1]
        count[key] = count.get(key, 0) + reshard.copies
        assert count[key] <= runs.get(reshard.source, 1), f"{key} crosses {count[key]} times"


def _ours(
    multi: MultiMesh, step: Step, state: Tree, batches: Sequence[Tree], plain: Any
) -> tuple[list[Tree], ProgramReport]:
    with multi:
        staged = mjit(step, donate_argnums=0)
        program = staged.lower(state, batches[0]).program
    results: list[Tree] = []
    before = counters.snapshot()
    for batch in batches:
        state, aux = staged(state, batch)
        results.append(jax.tree.map(_on_host, (state, aux)))
        if len(results) == 1:
            before = counters.snapshot()
    new = counters.since(before)
    again = plain._cache_size() - 1  # an optimizer may give back a state of other types
    assert new.argument_moves == 0, f"later steps move the state: {new}"
    assert new.traces == again and (again or new.compiles == 0), f"later steps begin anew: {new}"
    return results, program


def _on_a_submesh(
    multi: MultiMesh, plain: Any, state: Tree, batches: Sequence[Tree], known: list[Tree]
) -> list[Tree]:
    """Reference B: `plain` on a mesh of one submesh's shape, batches over its `data` axis."""
    sizes = {name: size for name, size in multi.shape.items() if name != "stage"}
    if all(size == 1 for size in sizes.values()):
        return known
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))])
    mesh = Mesh(devices.reshape([*sizes.values()]), tuple(sizes))
    rows = NamedSharding(mesh, P("data"))
    placed = jax.device_put((state, list(batches)), (NamedSharding(mesh, P()), rows))
    return _run(plain, *placed)


def _run(step: Step, state: Tree, batches: Sequence[Tree]) -> list[Tree]:
    results: list[Tree] = []
    for batch in batches:
        state, aux = step(state, batch)
        results.append((state, aux))
    return results


def _on_host(x: Any) -> Any:
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(x)))
    return np.array(x)
