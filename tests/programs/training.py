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


def train(
    multi: MultiMesh,
    step: Step,
    state: Tree,
    batches: Sequence[Tree],
    key: Any = None,
    *,
    ill_conditioned: bool = False,
) -> ProgramReport:
    """Runs `state, aux = step(state, batch)` on every batch and compares all results by R1.

    Programs of one `key` differ in schedules alone: they are compared with the same references.
    With `ill_conditioned`, what the references themselves compute badly has to be as near too.
    """
    if key is None or key not in _known:
        found = _references(multi, step, state, batches)
        _known[key] = found
    references, num_traces = _known[key]
    ours, program = _ours(multi, step, state, batches, num_traces)
    for results, others in zip(ours, references, strict=True):
        compared = compare(results, *others)
        if not ill_conditioned:
            compared.check()
        wrong = [str(leaf) for leaf in compared.leaves if leaf.exceeds]
        assert not wrong, "off by more than R1 allows:\n" + "\n".join(wrong)
    return program


_known: dict[Any, tuple[list[Tree], int]] = {}


def _references(
    multi: MultiMesh, step: Step, state: Tree, batches: Sequence[Tree]
) -> tuple[list[Tree], int]:
    """What A, B and the oracle give after each step, and how often plain `jax.jit` traced."""
    plain = jax.jit(step)
    in_one_place = _run(plain, jax.device_put(state, jax.devices()[0]), batches)
    num_traces = plain._cache_size()  # an optimizer may give back a state of other types
    on_mesh = _on_a_submesh(multi, plain, state, batches, in_one_place)
    exact = _run(Oracle(step, state, batches[0]), state, batches)
    return list(zip(in_one_place, on_mesh, exact, strict=True)), num_traces


def crossings(program: ProgramReport) -> dict[tuple[str, str], int]:
    """Copies a step by edge and type, without views of what is there already."""
    found: dict[tuple[str, str], int] = {}
    for reshard in program.reshards:
        if reshard.bytes:
            key = reshard.edge, reshard.type
            found[key] = found.get(key, 0) + reshard.copies
    return found


def arrays(program: ProgramReport) -> dict[tuple[str, str], int]:
    """The `crossings` between two submeshes that are no scalars."""
    found = crossings(program)
    places = {submesh.label for submesh in program.submeshes}
    return {
        (edge, type_): copies
        for (edge, type_), copies in found.items()
        if not type_.endswith("[]") and places.issuperset(edge.split(" -> "))
    }


def check_once(program: ProgramReport) -> None:
    """No value crosses to a submesh more often than it is made."""
    runs = {task.label: task.num_runs for task in program.tasks}
    counts: dict[tuple[str, str], int] = {}
    for reshard in program.reshards:
        key = reshard.value, reshard.edge.split(" -> ")[1]
        counts[key] = counts.get(key, 0) + reshard.copies
        assert counts[key] <= runs.get(reshard.source, 1), f"{key} crosses {counts[key]} times"


def stage_edges(program: ProgramReport) -> list[tuple[int, int]]:
    """The pairs of stages of which the first sends something to the second in every microbatch."""
    repeated = {task.label for task in program.tasks if task.num_runs > 1}
    sent = (r.edge for r in program.reshards if r.bytes and r.source in repeated and r.copies > 1)
    pairs = (edge.replace("stage=", "").split(" -> ") for edge in sent)
    return sorted({(int(a), int(b)) for a, b in pairs})


def _ours(
    multi: MultiMesh, step: Step, state: Tree, batches: Sequence[Tree], num_traces: int
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
    assert new.argument_moves == 0, f"later steps move the state: {new}"
    assert new.traces == num_traces - 1, f"later steps trace: {new}"
    assert new.compiles == 0 or num_traces > 1, f"later steps compile: {new}"
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
