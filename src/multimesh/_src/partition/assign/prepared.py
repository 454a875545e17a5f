"""What is made of a microbatch alone is made again wherever it is used.

    loop i: x = batch[i] ; n = (x - mean x) / std x         n@0, where it is used first
            a = tower0(n)@0 ; b = tower1(n)@1        ->     both make n of their slice of the batch

Were `n` sent, the second tower would wait for the first one in every iteration. The batch goes to
both once a call, so this is done where the slices have no more bytes than what crosses now, and
where it costs no more than the user's cut-off. What would cross against the direction of the
pipeline is made again whatever the bytes, or the first stage would wait for the last one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Step, Var
from multimesh._src.partition.assign.cloned import Cloned, cost_of
from multimesh._src.partition.loops import num_bytes
from multimesh._src.partition.prune import has_effect
from multimesh._src.partition.split.regions import Flow


def clone_preparations(
    program: FlatProgram,
    flow: Flow,
    seeded: Mapping[int, int],
    place: Mapping[int, int],
    max_cost: int,
) -> Cloned:
    """Returns the clones together with the preparations of microbatches worth cloning.

    Args:
        program: The flat program.
        flow: Its dataflow, and what is cloned already.
        seeded: Equations of tasks, by serial: they are never cloned.
        place: Submesh of each equation, by serial.
        max_cost: Element operations that may be done again in each task.
    """
    found: set[int] = set()
    for loop in _loops(program.steps):
        prepared = _prepared(loop, flow.cloned, seeded, max_cost)
        if prepared:
            first = _first_visits(loop, seeded)
            found |= _worth_cloning(loop, prepared, flow, place, first, program.avals)
    return replace(flow.cloned, floating=flow.cloned.floating | found)


def _loops(steps: tuple[Step, ...]) -> Iterator[Loop]:
    for step in steps:
        if isinstance(step, Loop):
            yield step
            yield from _loops(step.body)


def _prepared(
    loop: Loop, cloned: Cloned, seeded: Mapping[int, int], max_cost: int
) -> dict[int, frozenset[Var]]:
    """Equations that read nothing but slices of the iteration: the slices, by serial."""
    slices: dict[Var, frozenset[Var]] = {}
    costs: dict[Var, int] = {}
    prepared: dict[int, frozenset[Var]] = {}
    for step in loop.body:
        if isinstance(step, Loop) or has_effect(step):
            continue
        reads = [v for v in step.inputs if not isinstance(v, Lit)]
        if step.serial in cloned.light and step.primitive == "dynamic_slice":
            slices[step.outputs[0]], costs[step.outputs[0]] = frozenset(step.outputs), 0
            continue
        known = all(var in slices or var in cloned.variables for var in reads)
        own = frozenset[Var]().union(*(slices.get(var, ()) for var in reads))
        cost = cost_of(step.eqn) + sum(costs.get(var, 0) for var in dict.fromkeys(reads))
        if known and own and step.serial not in seeded and cost <= max_cost:
            prepared[step.serial] = own
            slices.update(dict.fromkeys(step.outputs, own))
            costs.update(dict.fromkeys(step.outputs, cost))
    return prepared


def _first_visits(loop: Loop, seeded: Mapping[int, int]) -> dict[int, int]:
    """The position of the first equation of a task on each submesh."""
    first: dict[int, int] = {}
    for position, step in enumerate(loop.body):
        if step.serial in seeded:
            first.setdefault(seeded[step.serial], position)
    return first


def _worth_cloning(
    loop: Loop,
    prepared: Mapping[int, frozenset[Var]],
    flow: Flow,
    place: Mapping[int, int],
    first: Mapping[int, int],
    avals: Mapping[Var, Any],
) -> set[int]:
    """The prepared equations behind what crosses, where that is better."""
    maker = {v: s for s in loop.body if isinstance(s, Equation) for v in s.outputs}
    crossing: dict[tuple[Var, int], None] = {}
    held: set[tuple[Var, int]] = set()  # slices that a submesh reads in any case
    for step in loop.body:
        if isinstance(step, Loop) or step.serial not in flow.anchored:
            continue
        here = place[step.serial]
        for var in _reads_of(step, flow):
            source = maker.get(var)
            if source is None:
                continue
            if source.serial in prepared and place[source.serial] != here:
                crossing[var, here] = None
            elif source.primitive == "dynamic_slice" and step.serial not in prepared:
                held.add((var, here))

    def slices_for(some: Iterable[tuple[Var, int]]) -> set[tuple[Var, int]]:
        return {(v, there) for var, there in some for v in prepared[maker[var].serial]}

    def size(some: Iterable[tuple[Var, int]]) -> int:
        return num_bytes([var for var, _ in sorted(some)], avals)

    def goes_back(var: Var, there: int) -> bool:
        start = first.get(place[maker[var].serial])
        return start is not None and start > first.get(there, start)

    back = [entry for entry in crossing if goes_back(*entry)]
    onward = [entry for entry in crossing if entry not in back]
    held |= slices_for(back)
    if size(slices_for(onward) - held) > size(onward):
        onward = []
    found: set[int] = set()
    todo = [maker[var] for var, _ in (*back, *onward)]
    while todo:
        step = todo.pop()
        if step.serial in prepared and step.serial not in found:
            found.add(step.serial)
            todo += [maker[v] for v in step.inputs if not isinstance(v, Lit) and v in maker]
    return found


def _reads_of(step: Equation, flow: Flow) -> Iterator[Var]:
    """What a step reads, looking through clones up to the slices of the iteration."""
    reads = (*step.inputs, *(guard.index for guard in step.guards))
    todo, seen = [v for v in reads if not isinstance(v, Lit)], set[Var]()
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        yield var
        source = flow.maker.get(var)
        if source is not None and source.serial in flow.cloned:
            todo += [v for v in source.inputs if not isinstance(v, Lit)]
