"""Moves groups of equations without a seed to where fewer bytes cross.

    with layer0: x = tanh(x @ w0)                 x@0
    h = x - mean(x) ; n = h * rsqrt(var(h))       placed one by one, next to their operands:    @0
    with layer1: x = x + n @ w1                   x and n cross, residuals of the backward too
                                        ->        the whole group @1: only x and its gradient cross

`places` decides one equation after the other, with the bytes known by then. Here the places so far
are improved: for two submeshes at a time, the equations of a connected group that lie on either
are spread anew over the two, by a minimum cut. A value costs its bytes once per submesh that it is
sent to. What comes from outside the region (arguments, loop constants) only breaks ties, and no
change may make a chain of changes of submesh longer: stages stay where they are.
"""

from collections.abc import Iterator, Mapping, Sequence

from multimesh._src.ir.flat import FlatProgram, Lit, Var
from multimesh._src.partition.assign.mincut import SINK, SOURCE, FlowGraph
from multimesh._src.partition.assign.sums import Accumulation, find_accumulations
from multimesh._src.partition.assign.values import Region, RegionReader, Value, regions_of
from multimesh._src.partition.split.regions import Flow


def settle_glue(
    program: FlatProgram,
    flow: Flow,
    seeded: Mapping[int, int],
    place: Mapping[int, int],
    arguments: Mapping[Var, int],
    results: Mapping[int, int],
) -> dict[int, int]:
    """Returns the places with groups of unseeded equations moved where that saves bytes.

    Args:
        program: The flat program.
        flow: Its dataflow, and the equations that each task makes for itself.
        seeded: Equations that stay where they are, by serial.
        place: Submesh of each equation, by serial.
        arguments: Submesh of each argument that the caller placed.
        results: Submesh of each result position that `out_shardings` places.
    """
    found = dict(place)
    wanted: dict[Var, tuple[int, ...]] = {}
    for position, submesh in results.items():
        var = program.results[position]
        if not isinstance(var, Lit):
            wanted[var] = (*wanted.get(var, ()), submesh)
    accumulations = find_accumulations(program, seeded, flow.cloned)
    additions = frozenset(serial for sum_ in accumulations for serial in sum_.additions)
    for loop, steps in regions_of(program.steps):
        reader = RegionReader(program.avals, flow, seeded, arguments, wanted, additions)
        region = reader.read(loop, steps)
        before = dict(found)
        for group in _groups(region, found):
            _settle(region, group, found)
        _follow_operands(region, before, found)
        _follow_terms(accumulations, reader.made_by, flow, found)
    return found


def _follow_operands(region: Region, before: Mapping[int, int], place: dict[int, int]) -> None:
    """Numbers made of what has moved move with it."""
    makes_arrays = {value.maker for value in region.values if not value.is_scalar}
    moved = {serial for serial in before if place[serial] != before[serial]}
    for serial, operands in region.order if moved else ():
        there = {place[operand] for operand in operands}
        follows = serial in region.free and serial not in makes_arrays
        if follows and len(there) == 1 and not moved.isdisjoint(operands):
            (place[serial],) = there
            moved.add(serial)


def _follow_terms(
    accumulations: Sequence[Accumulation],
    made_by: Mapping[Var, int],
    flow: Flow,
    place: dict[int, int],
) -> None:
    """Additions to an accumulator follow their terms."""
    for accumulation in accumulations:
        sources = (source for term in accumulation.terms for source in flow.sources(term))
        there = [place[made_by[source]] for source in sources if source in made_by]
        for serial in accumulation.additions:
            if there and place[serial] not in there:
                place[serial] = there[-1]


def _groups(region: Region, place: Mapping[int, int]) -> Iterator[list[int]]:
    """Free equations that arrays connect, in groups that something crosses into, out of or in."""
    parent = {serial: serial for serial in sorted(region.free)}

    def root(serial: int) -> int:
        while parent[serial] != serial:
            parent[serial] = parent[parent[serial]]
            serial = parent[serial]
        return serial

    crossed: set[int] = set()
    for value in region.values:
        if not value.made_here or value.is_scalar:
            continue
        ends = [value.maker, *value.readers] if value.maker is not None else [*value.readers]
        free = [serial for serial in ends if serial in region.free]
        for serial in free[1:]:
            one, other = sorted((root(free[0]), root(serial)))
            parent[other] = one
        if free and len({*(place[serial] for serial in ends), *value.wanted}) > 1:
            crossed.add(free[0])
    wanted = {root(serial) for serial in crossed}
    groups: dict[int, list[int]] = {}
    for serial in parent:
        if root(serial) in wanted:
            groups.setdefault(root(serial), []).append(serial)
    yield from groups.values()


# --- two submeshes at a time ----------------------------------------------------------------------


def _settle(region: Region, group: Sequence[int], place: dict[int, int]) -> None:
    """Spreads a group anew over pairs of submeshes until no pair saves bytes."""
    members = frozenset(group)
    positions = {position for serial in group for position in region.values_of[serial]}
    values = [region.values[position] for position in sorted(positions)]
    again = True
    while again:
        again = False
        for pair in _pairs(values, members, place):
            moved = _spread(values, group, place, pair)
            new = place | moved
            saves = moved and _crossing(values, new) < _crossing(values, place)
            longest = zip(_depths(region, new), _depths(region, place), strict=True)
            if saves and all(after <= before for after, before in longest):
                place.update(moved)
                again = True


def _pairs(
    values: Sequence[Value], members: frozenset[int], place: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Pairs of submeshes between which something crosses that a member makes or reads."""
    pairs: dict[tuple[int, int], None] = {}
    for value in values:
        if value.maker is None:
            continue
        here = place[value.maker]
        for there in (*(place[serial] for serial in value.readers), *value.wanted):
            if there != here:
                pairs[min(here, there), max(here, there)] = None
    held = {place[serial] for serial in members}
    return [pair for pair in sorted(pairs) if held.intersection(pair)]


def _crossing(values: Sequence[Value], place: Mapping[int, int]) -> int:
    """Bytes of made values that are sent, once per submesh."""
    total = 0
    for value in values:
        if value.maker is not None:
            there = {*(place[serial] for serial in value.readers), *value.wanted}
            total += value.bytes * len(there - {place[value.maker]})
    return total


def _depths(region: Region, place: Mapping[int, int]) -> tuple[int, int]:
    """The most changes of submesh on any path through the region, and through its forward pass."""
    depth: dict[int, int] = {}
    for serial, operands in region.order:
        here = place[serial]
        steps = (depth[o] + (place[o] != here) for o in operands if o in depth)
        depth[serial] = max(steps, default=0)
    forward = (number for serial, number in depth.items() if serial in region.forward)
    return max(depth.values(), default=0), max(forward, default=0)


def _spread(
    values: Sequence[Value], group: Sequence[int], place: Mapping[int, int], pair: tuple[int, int]
) -> dict[int, int]:
    """The equations of the group that change their place in the best spread over two submeshes."""
    members = [serial for serial in group if place[serial] in pair]
    outside = sum(value.bytes for value in values if not value.made_here)
    # first the bytes that cross, then those from outside the region, then the fewest moves
    weight_outside = len(members) + 1
    weight_made = weight_outside * (2 * outside + 1)
    graph = FlowGraph()
    node = {serial: graph.add_node() for serial in members}
    for serial, number in node.items():
        ends = (SOURCE, number) if place[serial] == pair[0] else (number, SINK)
        graph.add_edge(*ends, 1)
    for value in values:
        cost = value.bytes * (weight_made if value.made_here else weight_outside)
        if cost:
            _add_value(graph, value, cost, node, place, pair)
    left = graph.source_side()
    new = {serial: pair[0] if number in left else pair[1] for serial, number in node.items()}
    return {serial: there for serial, there in new.items() if there != place[serial]}


def _add_value(
    graph: FlowGraph,
    value: Value,
    cost: int,
    node: Mapping[int, int],
    place: Mapping[int, int],
    pair: tuple[int, int],
) -> None:
    """Enters what a value costs: once for each of the two submeshes that it has to be sent to."""
    fixed = {*(place[serial] for serial in value.readers if serial not in node), *value.wanted}
    readers = [node[serial] for serial in value.readers if serial in node]
    maker = None if value.maker is None else node.get(value.maker)
    home = value.home if value.maker is None else place[value.maker]
    for this, here, there in ((pair[0], SOURCE, SINK), (pair[1], SINK, SOURCE)):
        # what has to be sent to `this`: unless it is made there, as soon as one reader is there
        if maker is None and home == this:
            continue
        unless = there if maker is None else maker
        if this in fixed:
            if maker is not None:
                _edge(graph, here, unless, cost, here)
            continue
        if readers:
            needed = graph.add_node()
            for reader in readers:
                _edge(graph, reader, needed, None, here)
            _edge(graph, needed, unless, cost, here)


def _edge(graph: FlowGraph, tail: int, head: int, capacity: int | None, side: int) -> None:
    """An edge that is cut if its tail is on `side` and its head is not."""
    ends = (tail, head) if side == SOURCE else (head, tail)
    graph.add_edge(*ends, capacity)
