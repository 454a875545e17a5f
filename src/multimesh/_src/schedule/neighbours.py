"""Which actions a schedule runs together: what may become one task, asked by the partitioner."""

from typing import TypeAlias

from multimesh._src.schedule.actions import Action, Pair, actions_of
from multimesh._src.schedule.graph import Part
from multimesh._src.schedule.schedule import Schedule

Neighbours: TypeAlias = tuple[Part, Part]


def overlapped_parts(schedule: Schedule) -> tuple[Neighbours, ...]:
    """The parts that stand in the rows as overlapped pairs, in order of rank and time."""
    found: dict[Neighbours, None] = {}
    for row in schedule.rows:
        for entry in row:
            if isinstance(entry, Pair):
                found[_part(entry.first), _part(entry.second)] = None
    return tuple(found)


def adjacent_parts(schedule: Schedule) -> tuple[Neighbours, ...]:
    """The parts of which the second always follows the first, for the same microbatch.

    So does the last stage's backward follow its forward in 1f1b.
    """
    found: list[Neighbours] = []
    for row in schedule.rows:
        followers: dict[Part, set[Part | None]] = {}
        for entry, after in zip(row, (*row[1:], None), strict=True):
            other: Part | None = None
            if isinstance(entry, Action) and isinstance(after, Action):
                other = _part(after) if after.microbatch == entry.microbatch else None
            for action in actions_of(entry):
                followers.setdefault(_part(action), set()).add(other)
        for part, others in followers.items():
            other = next(iter(others))
            if len(others) == 1 and other is not None:
                found.append((part, other))
    return tuple(found)


def _part(action: Action) -> Part:
    return Part(action.kind, action.stage)
