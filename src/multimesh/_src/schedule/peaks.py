"""Peak memory of a schedule: how many residual sets live at once on every rank, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.costs import Memory
from multimesh._src.schedule.expand import Expanded, ExpandedRow
from multimesh._src.schedule.graph import StageGraph


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per rank the largest number of sets that live at once.

    A set belongs to one stage and microbatch. It is there before F and goes with BW; with a split
    backward after B or after W, depending on what W still reads.

    Attributes:
        until_b: Sets, if they go after B.
        until_w: Sets, if they go after W.
        waiting: Sets between B and W.
        num_bytes: Bytes, of the sets between F and B and of those between B and W together.
    """

    until_b: tuple[int, ...]
    until_w: tuple[int, ...]
    waiting: tuple[int, ...]
    num_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Changes:
    """Per unit by how much it changes what is alive; only an F opens sets, all else closes."""

    until_b: list[int]
    until_w: list[int]
    waiting: list[int]
    num_bytes: list[float]


def peaks_of(expanded: Expanded, memory: Memory) -> Peaks:
    """The peaks of every rank. They depend on the rows alone, not on run times."""
    graph = expanded.graph
    changes = _Changes([], [], [], [])
    for kind in Kind:
        for stage in range(len(graph.placement)):
            _add_changes(changes, kind, stage, graph, memory)
    flat = [_flat_units(row, changes) for row in expanded.rows]
    return Peaks(
        until_b=tuple(int(_peak(units, changes.until_b)) for units in flat),
        until_w=tuple(int(_peak(units, changes.until_w)) for units in flat),
        waiting=tuple(int(_peak(units, changes.waiting)) for units in flat),
        num_bytes=tuple(memory.fixed + _peak(units, changes.num_bytes) for units in flat),
    )


def _add_changes(
    changes: _Changes, kind: Kind, stage: int, graph: StageGraph, memory: Memory
) -> None:
    """A stage without backward keeps nothing; one without B keeps its set until W."""
    residual, waiting = memory.of(stage)
    has_b, has_w = (bool(graph.covers(kind, stage)) for kind in (Kind.B, Kind.W))
    match kind:
        case Kind.F:
            kept = int(bool(graph.covers(Kind.BW, stage)))
            change = (kept, kept, 0, kept * residual)
        case Kind.B:
            after = (waiting if has_w else 0.0) - residual
            change = (-1, -int(not has_w), int(has_w), after)
        case Kind.W:
            change = (-int(not has_b), -1, -int(has_b), -waiting if has_b else -residual)
        case Kind.BW:
            change = (-1, -1, 0, -residual)
    changes.until_b.append(change[0])
    changes.until_w.append(change[1])
    changes.waiting.append(change[2])
    changes.num_bytes.append(change[3])


def _flat_units(row: ExpandedRow, changes: _Changes) -> list[int]:
    """The units of a row; a pair opens the set of its F before it closes any."""
    if not row.seconds:
        return row.units
    flat: list[int] = []
    for position, unit in enumerate(row.units):
        flat.append(unit)
        if position in row.seconds:
            flat.append(row.seconds[position][0])
            flat[-2:] = sorted(flat[-2:], key=changes.until_w.__getitem__, reverse=True)
    return flat


def _peak(units: list[int], change: Sequence[float]) -> float:
    # All of it runs in C: schedules have millions of actions.
    return max(accumulate(map(change.__getitem__, units)), default=0.0)
