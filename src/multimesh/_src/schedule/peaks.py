"""Peak memory of a schedule: how many residual sets live at once on every rank, and their bytes."""

from dataclasses import dataclass

from multimesh._src.schedule.actions import Action, Kind, Row, actions_of
from multimesh._src.schedule.costs import Memory
from multimesh._src.schedule.graph import Part, StageGraph
from multimesh._src.schedule.schedule import Schedule


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
class _Effect:
    """What an action does to the live sets: before it runs, and after it."""

    opened: int  # sets that its F opens
    closed_b: int  # sets that end with their last of B, BW
    closed_w: int  # sets that end with their last of W, BW
    waiting: int  # sets that begin (1) or end (-1) to wait for W
    bytes_before: float
    bytes_after: float


def peaks_of(schedule: Schedule, graph: StageGraph, memory: Memory) -> Peaks:
    """The peaks of every rank. They depend on the rows alone, not on run times."""
    effects = {
        (kind, stage): _effect(Part(kind, stage), graph, memory)
        for kind in Kind
        for stage in range(len(graph.placement))
    }
    found = [_row_peaks(row, effects, memory.fixed) for row in schedule.rows]
    until_b, until_w, waiting, num_bytes = zip(*found, strict=True)
    return Peaks(until_b, until_w, waiting, num_bytes)


def _effect(part: Part, graph: StageGraph, memory: Memory) -> _Effect:
    """A stage without backward keeps nothing; one without B keeps its set until W."""
    kind, stage = part.kind, part.stage
    residual, waiting = memory.of(stage)
    has_w = bool(graph.covers(Kind.W, stage))
    has_b = bool(graph.covers(Kind.B, stage))
    match kind:
        case Kind.F:
            kept = int(bool(graph.covers(Kind.BW, stage)))
            return _Effect(kept, 0, 0, 0, kept * residual, 0.0)
        case Kind.BW:
            return _Effect(0, 1, 1, 0, 0.0, -residual)
        case Kind.B:
            after = (waiting if has_w else 0.0) - residual
            return _Effect(0, 1, int(not has_w), int(has_w), 0.0, after)
        case Kind.W:
            after = -waiting if has_b else -residual
            return _Effect(0, int(not has_b), 1, -int(has_b), 0.0, after)


def _row_peaks(
    row: Row, effects: dict[tuple[Kind, int], _Effect], fixed: float
) -> tuple[int, int, int, float]:
    live_b = live_w = waiting = peak_b = peak_w = peak_waiting = 0
    live_bytes = peak_bytes = fixed
    for entry in row:
        parts = (entry,) if isinstance(entry, Action) else actions_of(entry)
        done = [effects[a.kind, a.stage] for a in parts]
        for effect in done:
            live_b += effect.opened
            live_w += effect.opened
            live_bytes += effect.bytes_before
        peak_b, peak_w = max(peak_b, live_b), max(peak_w, live_w)
        peak_bytes = max(peak_bytes, live_bytes)
        for effect in done:
            live_b -= effect.closed_b
            live_w -= effect.closed_w
            waiting += effect.waiting
            live_bytes += effect.bytes_after
        peak_waiting = max(peak_waiting, waiting)
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_b, peak_w, peak_waiting, peak_bytes
