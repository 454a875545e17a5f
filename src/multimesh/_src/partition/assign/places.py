"""Spreads the submeshes of the seeds over all other equations.

    y = x @ w1            # seed: stage=0              y : stage=0
    u = y * 2 + t         # no seed                    u : stage=0, where its operand is made
    z = u @ w2            # seed: stage=1              z : stage=1
    m' = 0.9 m + g        # g is made on stage=1       m' : stage=1

An equation without a seed goes where the fewest bytes cross: its operands count where they are
made, its result where its seeded users are. In the forward pass of a loop it never goes back to
where the pipeline has been: that would be one more stage. Loop bodies are decided before what is
around them. Arguments and loop constants have a say only when nothing else has, scalars only at
the very end.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multimesh._src.ir.flat import Carry, Equation, FlatProgram, Lit, Loop, Operand, Step, Var
from multimesh._src.partition.assign.cloned import Cloned


@dataclass(slots=True)
class _Table:
    """What is known so far. `place` holds equations by serial, `var_place` variables."""

    avals: Mapping[Var, Any]
    cloned: Cloned
    seeded: Mapping[int, int]
    place: dict[int, int] = field(default_factory=dict)
    var_place: dict[Var, int] = field(default_factory=dict)
    made_by: dict[Var, Equation] = field(default_factory=dict)
    order: dict[Var, int] = field(default_factory=dict)  # when a variable is made
    hops: dict[Var, int] = field(default_factory=dict)  # changes of submesh behind a variable
    passed: dict[Var, frozenset[int]] = field(default_factory=dict)  # submeshes up to a variable
    users: dict[Var, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    wanted: dict[Var, list[int]] = field(default_factory=lambda: defaultdict(list))
    region: dict[Var, int] = field(default_factory=dict)  # serial of the loop it is made in
    carries: list[Carry] = field(default_factory=list)
    rooted: set[Var] = field(default_factory=set)  # made of what a seed makes
    weak: set[Var] = field(default_factory=set)


def assign_places(
    program: FlatProgram,
    cloned: Cloned,
    seeded: Mapping[int, int],
    arguments: Mapping[Var, int],
    results: Mapping[int, int],
    successors: Mapping[int, Var],
    default: int,
) -> dict[int, int]:
    """Gives every equation a submesh.

    Args:
        program: The flat program.
        cloned: Equations that need no place; they get one only where a result or a carry needs it.
        seeded: Submesh of each seed, by serial.
        arguments: Submesh of each argument that the caller placed.
        results: Submesh of each result position that `out_shardings` places.
        successors: The argument that a result succeeds, by position of the result.
        default: The submesh of what nothing else decides.

    Returns:
        The submesh of each equation, by serial.
    """
    table = _Table(program.avals, cloned, seeded)
    table.var_place.update(arguments)
    table.weak.update(program.arguments)
    table.weak.update(program.constants)
    regions: list[tuple[Equation, ...]] = []
    _index(program.steps, table, regions, region=-1)
    for position, place in results.items():
        var = program.results[position]
        if not isinstance(var, Lit):
            table.wanted[var].append(place)
    table.place.update(seeded)
    for scalars, weak in ((False, False), (False, True), (True, False), (True, True)):
        for _ in range(len(regions) + 2):  # carries may pass a place from loop to loop
            changed = [_decide_region(eqs, table, scalars=scalars, weak=weak) for eqs in regions]
            if not any(changed):
                break
        if not weak:
            _vote_for_arguments(program, table)
    _place_successors(program, successors, table)
    everything = [equation for region in regions for equation in region]
    return {eq.serial: table.place.get(eq.serial, default) for eq in everything}


def _index(
    steps: tuple[Step, ...], table: _Table, regions: list[tuple[Equation, ...]], region: int
) -> None:
    for step in steps:
        if isinstance(step, Loop):
            table.carries += step.carries
            for carry in step.carries:
                if _is_rooted(carry.init, table):
                    table.rooted.add(carry.inside)
                table.order[carry.inside] = len(table.order)
                table.region[carry.inside] = step.serial
            _index(step.body, table, regions, step.serial)
            for carry in step.carries:
                if _is_rooted(carry.next, table):
                    table.rooted.add(carry.result)
                table.order[carry.result] = len(table.order)
                table.region[carry.result] = region
            continue
        for var in step.inputs:
            if not isinstance(var, Lit):
                table.users[var].append(step)
        if step.serial in table.seeded or any(_is_rooted(v, table) for v in step.inputs):
            table.rooted.update(step.outputs)
        for var in step.outputs:
            table.made_by[var] = step
            table.order[var] = len(table.order)
            table.region[var] = region
    regions.append(tuple(step for step in steps if isinstance(step, Equation)))


def _is_rooted(operand: Operand, table: _Table) -> bool:
    return not isinstance(operand, Lit) and operand in table.rooted


def _decide_region(
    equations: tuple[Equation, ...], table: _Table, *, scalars: bool, weak: bool
) -> bool:
    """One sweep down and one sweep up; says whether anything was decided."""
    before = len(table.place)
    for equation in equations:
        if equation.serial not in table.place:
            if not (weak and _waits(equation, table, scalars)):
                _settle(equation, _from_operands(equation, table, scalars, weak), table)
        else:
            _settle(equation, table.place[equation.serial], table)
        _count_hops(equation, table)
    _settle_carries(table)
    for equation in reversed(equations):
        if equation.serial not in table.place and not _waits(equation, table, scalars):
            _settle(equation, _from_users(equation, table, scalars), table)
    _settle_carries(table)
    return len(table.place) > before


def _waits(equation: Equation, table: _Table, scalars: bool) -> bool:
    """Whether an operand is to be placed by numbers, in a later sweep, and then decides."""
    return not scalars and any(
        _is_rooted(v, table) and v not in table.var_place and v not in table.cloned.variables
        for v in equation.inputs
    )


def _settle(equation: Equation, place: int | None, table: _Table) -> None:
    if place is None:
        return
    table.place[equation.serial] = place
    if equation.serial not in table.cloned.floating:
        table.var_place.update(dict.fromkeys(equation.outputs, place))


def _count_hops(equation: Equation, table: _Table) -> None:
    place = table.place.get(equation.serial)
    hops = 0
    for var in equation.inputs:
        if not isinstance(var, Lit) and var not in table.weak:
            there = table.var_place.get(var)
            moved = there is not None and place is not None and there != place
            hops = max(hops, table.hops.get(var, 0) + moved)
    table.hops.update(dict.fromkeys(equation.outputs, hops))
    found = (table.passed.get(v) for v in equation.inputs if not isinstance(v, Lit))
    passed = frozenset() if place is None else frozenset((place,))
    passed = passed.union(*filter(None, found))
    table.passed.update(dict.fromkeys(equation.outputs, passed))


def _settle_carries(table: _Table) -> None:
    """A carry lives where its next value is made, else where its value inside is used."""
    for carry in table.carries:
        place = None if isinstance(carry.next, Lit) else table.var_place.get(carry.next)
        if not isinstance(carry.next, Lit):
            table.hops[carry.result] = table.hops.get(carry.next, 0)
        if place is None:
            places = _user_places(carry.inside, table) or _user_places(carry.result, table)
            place = next(iter(places), None)
        if place is not None:
            table.var_place[carry.inside] = table.var_place[carry.result] = place
            if not isinstance(carry.init, Lit) and place not in table.wanted[carry.init]:
                table.wanted[carry.init].append(place)
            if not isinstance(carry.next, Lit) and place not in table.wanted[carry.next]:
                table.wanted[carry.next].append(place)


def _bytes(var: Var, table: _Table) -> int:
    """Bytes that move when `var` does; a broadcast counts as its operand."""
    maker = table.made_by.get(var)
    while maker is not None and maker.serial in table.cloned.light:
        if maker.primitive == "dynamic_slice":
            break  # what is cut from moves once for all iterations
        (var,) = (v for v in maker.inputs if not isinstance(v, Lit))
        maker = table.made_by.get(var)
    aval = table.avals[var]
    return aval.size * aval.dtype.itemsize


def _region_of(equation: Equation, table: _Table) -> int:
    """The serial of the loop around an equation that makes something, else -1."""
    return table.region.get(equation.outputs[0], -1) if equation.outputs else -1


def _voters(equation: Equation, table: _Table, scalars: bool, weak: bool) -> list[Var]:
    region = _region_of(equation, table)

    def may_vote(var: Var) -> bool:
        if var not in table.var_place or var in table.cloned.variables:
            return False
        outside = var in table.weak or table.region.get(var, -1) != region
        return (weak or not outside) and (scalars or table.avals[var].ndim > 0)

    operands = dict.fromkeys(v for v in equation.inputs if not isinstance(v, Lit))
    return [var for var in operands if may_vote(var)]


def _from_operands(equation: Equation, table: _Table, scalars: bool, weak: bool) -> int | None:
    if equation.serial in table.cloned.floating:
        return None
    scalars = scalars or equation.scope.transposes > 0
    voters = _voters(equation, table, scalars, weak)
    if not voters:
        return None
    seeded_users = _seeded_user_places(equation, table)
    # made last: furthest along the pipeline, whatever the order of the text
    voters.sort(key=lambda v: (table.hops.get(v, 0), table.order.get(v, -1)), reverse=True)
    candidates = list(dict.fromkeys([table.var_place[v] for v in voters] + seeded_users))
    if not equation.scope.transposes and _region_of(equation, table) >= 0:
        candidates = _not_back(candidates, voters, table) or candidates
    result = sum(_bytes(var, table) for var in equation.outputs)

    def crossing(place: int) -> int:
        operands = sum(_bytes(var, table) for var in voters if table.var_place[var] != place)
        return operands + result * sum(user != place for user in seeded_users)

    return min(candidates, key=crossing)  # the first of equals: the operand made last


def _not_back(candidates: list[int], voters: Iterable[Var], table: _Table) -> list[int]:
    """The places that no operand has left on its way."""
    left: set[int] = set()
    for var in voters:
        left |= table.passed.get(var, frozenset()) - {table.var_place[var]}
    return [place for place in candidates if place not in left]


def _seeded_user_places(equation: Equation, table: _Table) -> list[int]:
    places = [
        table.seeded[user.serial]
        for var in equation.outputs
        for user in table.users[var]
        if user.serial in table.seeded and user.serial not in table.cloned.floating
    ]
    places += [place for var in equation.outputs for place in table.wanted[var]]
    return list(dict.fromkeys(places))


def _user_places(var: Var, table: _Table, *, backward: bool = True) -> list[int]:
    """Places of the users of `var`, looking through what is cloned, most frequent first.

    Without `backward` users in the backward pass do not count.
    """
    places: dict[int, int] = {}
    todo, seen = deque((var,)), {var}
    while todo:
        current = todo.popleft()
        for place in table.wanted[current]:
            places[place] = places.get(place, 0) + 1
        for user in table.users[current]:
            if user.scope.transposes and not backward:
                continue
            if user.serial in table.cloned:
                new = [v for v in user.outputs if v not in seen]
                seen.update(new)
                todo += new
            if user.serial in table.place and user.serial not in table.cloned.floating:
                place = table.place[user.serial]
                places[place] = places.get(place, 0) + 1
    return sorted(places, key=lambda place: -places[place])


def _from_users(equation: Equation, table: _Table, scalars: bool) -> int | None:
    # Numbers that the forward pass makes decide where it goes on, before its backward pass does.
    backward = scalars or equation.scope.transposes > 0
    backward = backward or table.rooted.isdisjoint(equation.outputs)
    scalars = scalars or equation.scope.transposes > 0
    places: Iterable[int]
    if equation.serial in table.cloned.floating:
        # each user makes it for itself: no vote, and no look along a chain that may be long
        users = [user.serial for var in equation.outputs for user in table.users[var]]
        wanted = [place for var in equation.outputs for place in table.wanted[var]]
        places = (*wanted, *(table.place[user] for user in users if user in table.place))
    else:
        outputs = (var for var in equation.outputs if scalars or table.avals[var].ndim > 0)
        places = (place for var in outputs for place in _user_places(var, table, backward=backward))
    return next(iter(places), None)


def _place_successors(program: FlatProgram, successors: Mapping[int, Var], table: _Table) -> None:
    """A result that nothing else places is made where the argument lives that it succeeds."""
    for position, argument in successors.items():
        var = program.results[position]
        maker = None if isinstance(var, Lit) else table.made_by.get(var)
        if maker is not None and maker.serial not in table.place:
            _settle(maker, table.var_place.get(argument), table)


def _vote_for_arguments(program: FlatProgram, table: _Table) -> None:
    """Arguments without a place get the submesh that uses them most, as far as known."""
    for var in (*program.arguments, *program.constants):
        if var not in table.var_place:
            places = _user_places(var, table)
            if places:
                table.var_place[var] = places[0]
