"""Which result takes the buffer of which donated argument.

    update  (w, g, m) -> (m2, w2)        arguments 0 and 2 may be donated
    with    m2 = 0.9 m + g
            w2 = w - m2                  pairs (0, 1) and (2, 0)

XLA writes the result of a pair into the argument's buffer. A pair whose two sides do not belong
together is still correct, but XLA then copies the argument away first.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr

from multimesh._src.ir.plan import Plan, Run, SlotInfo
from multimesh._src.jax_compat import jaxprs

Pairs: TypeAlias = tuple[tuple[int, int], ...]  # (argument, result that takes its buffer)

_MAX_DISTANCE = 16  # equations followed from a result to the argument that it updates
_MAX_ANCESTORS = 64


def runs_of(plan: Plan) -> Iterator[tuple[int, Run]]:
    """Yields the steps that run an executable, with their numbers."""
    return ((i, step) for i, step in enumerate(plan.steps) if isinstance(step, Run))


def pair_donations(plan: Plan, allowed: Iterable[tuple[int, int]]) -> tuple[Pairs, ...]:
    """Gives each donated argument a result of the same type and layout, one result each.

    Arguments for which no result is left are not donated. First choice is the result that becomes
    this argument in a later run of the executable (an accumulator), then the result that is made of
    it in the fewest equations (an optimizer's update), then any.

    Args:
        plan: The plan.
        allowed: The (executable, argument) pairs that may be donated.

    Returns:
        Per executable the pairs, by argument.
    """
    first_runs: dict[int, Run] = {}
    for _, run in runs_of(plan):
        first_runs.setdefault(run.executable, run)
    arguments: dict[int, list[int]] = defaultdict(list)
    for number, argument in sorted(allowed):
        arguments[number].append(argument)
    chained = _chained(plan)
    return tuple(
        _match(
            [_place(plan.slots[slot]) for slot in first_runs[number].inputs],
            [_place(plan.slots[slot]) for slot in first_runs[number].outputs],
            arguments[number],
            [*chained[number], *_nearest(executable.body, arguments[number])],
        )
        if arguments[number]
        else ()
        for number, executable in enumerate(plan.executables)
    )


def _match(
    given: Sequence[Any],
    made: Sequence[Any],
    arguments: Sequence[int],
    preferred: Sequence[tuple[int, int]],
) -> Pairs:
    """Pairs arguments with results of equal places, the preferred pairs first."""
    taken: dict[int, int] = {}
    free = dict.fromkeys(range(len(made)))
    for argument, result in preferred:
        wanted = argument in arguments and argument not in taken and result in free
        if wanted and given[argument] == made[result]:
            taken[argument] = result
            del free[result]
    by_place: dict[Any, deque[int]] = defaultdict(deque)
    for result in free:
        by_place[made[result]].append(result)
    for argument in arguments:
        if argument not in taken and by_place[given[argument]]:
            taken[argument] = by_place[given[argument]].popleft()
    return tuple(sorted(taken.items()))


def _place(info: SlotInfo) -> Any:
    """Returns what two slots of one submesh must have in common to share a buffer."""
    spec = (dim if isinstance(dim, tuple) or dim is None else (dim,) for dim in info.sharding.spec)
    sizes = info.sharding.mesh.shape
    axes = [tuple(axis for axis in dim or () if sizes[axis] > 1) for dim in spec]
    while axes and not axes[-1]:
        axes.pop()
    return (info.aval.shape, info.aval.dtype, tuple(axes), info.sharding.memory_kind)


def _chained(plan: Plan) -> Mapping[int, list[tuple[int, int]]]:
    """Returns per executable (argument, result) where a run's result is the argument of another."""
    made = {slot: (run, k) for _, run in runs_of(plan) for k, slot in enumerate(run.outputs)}
    found: dict[int, dict[tuple[int, int], None]] = defaultdict(dict)
    for _, run in runs_of(plan):
        for j, slot in enumerate(run.inputs):
            source, k = made.get(slot, (None, 0))
            if source is not None and source.executable == run.executable:
                found[run.executable][j, k] = None
    return defaultdict(list, {number: list(pairs) for number, pairs in found.items()})


def _nearest(body: ClosedJaxpr, arguments: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (argument, result) pairs, those with the fewest equations between them first."""
    jaxpr = body.jaxpr
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    positions = {jaxpr.invars[j]: j for j in arguments}
    found = (
        (distance, positions[var], k)
        for k, result in enumerate(jaxpr.outvars)
        if not jaxprs.is_literal(result)
        for var, distance in _ancestors(result, makers).items()
        if var in positions
    )
    return [(argument, result) for _, argument, result in sorted(found)]


def _ancestors(result: Any, makers: Mapping[Any, Any]) -> dict[Any, int]:
    """Returns the nearest values of the result's own type that it is made of, with distances."""
    wanted = (result.aval.shape, result.aval.dtype)
    distances = {result: 0}
    front = [result]
    for distance in range(1, _MAX_DISTANCE + 1):
        operands = (o for var in front if var in makers for o in makers[var].invars)
        front = []
        for operand in operands:
            if jaxprs.is_literal(operand) or operand in distances:
                continue
            if (operand.aval.shape, operand.aval.dtype) == wanted:
                distances[operand] = distance
                front.append(operand)
        if not front or len(distances) > _MAX_ANCESTORS:
            break
    return distances
