"""The window of a schedule that errors show: a few steps of a few ranks, with an arrow."""

from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.schedule import Schedule

_STEPS_AROUND = 2
_MAX_RANKS = 8


def window(schedule: Schedule, graph: StageGraph, rank: int, position: int) -> str:
    """The steps around position `position` of rank `rank`, with an arrow at its step.

    Step k holds the k-th entry of every row; at most eight ranks around the one in question are
    shown.
    """
    left = max(0, min(rank - _MAX_RANKS // 2, schedule.num_ranks - _MAX_RANKS))
    ranks = range(left, min(left + _MAX_RANKS, schedule.num_ranks))
    longest = max(map(len, schedule.rows))
    steps = range(max(0, position - _STEPS_AROUND), min(longest, position + _STEPS_AROUND + 1))
    head = ["", *(graph.label(r) for r in ranks)]
    table = [
        [f"step {k}", *(_cell(schedule, r, k, k == position and r == rank) for r in ranks)]
        for k in steps
    ]
    widths = [max(map(len, column)) for column in zip(head, *table, strict=True)]
    lines: list[str] = []
    for k, cells in zip((-1, *steps), (head, *table), strict=True):
        line = "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()
        lines.append(f"{line}  <-- here" if k == position else line)
    return "\n".join(lines)


def _cell(schedule: Schedule, rank: int, position: int, marked: bool) -> str:
    row = schedule.rows[rank]
    text = str(row[position]) if position < len(row) else ""
    return f"`{text}`" if marked else text
