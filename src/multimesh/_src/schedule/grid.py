"""`grid`: a schedule drawn over time, one line a rank."""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from multimesh._src.schedule.actions import Action, Kind, Pair, TaskRun
from multimesh._src.schedule.costs import UNIT, Costs, Latency
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.simulate import Simulation, simulate

# ANSI codes: black on a colour per kind, the brighter one for every second chunk of a rank.
_COLORS = {Kind.F: (44, 104), Kind.B: (42, 102), Kind.BW: (42, 102), Kind.W: (45, 105)}
_PAIR_COLOR, _TASK_COLOR = 43, 47


@dataclass(frozen=True, slots=True)
class _Block:
    """Something that runs: its text, the first column and the number of columns."""

    text: str
    start: int
    length: int
    color: int


def grid(
    schedule: Schedule | Simulation,
    graph: StageGraph | None = None,
    *,
    costs: Costs | Mapping[str, float] = UNIT,
    latency: Latency = 0.0,
    width: int = 0,
    color: bool | None = None,
) -> str:
    """Draws a schedule over time.

    A column is the shortest run time that occurs; what takes longer is filled with `-`, idle
    columns show a dot. Other run times are rounded to columns.

    Args:
        schedule: A schedule, which is simulated with the other arguments, or a simulation.
        graph: The program's stage graph; the textbook chain by default.
        costs: See `simulate`.
        latency: See `simulate`.
        width: Characters a line, after which the drawing goes on below; by default those of the
            terminal, without limit where there is none.
        color: Whether to colour the actions; by default if standard output is a terminal.

    Returns:
        The drawing, to be printed.

    Raises:
        ScheduleError: The schedule does not run to its end.

    >>> print(grid(make_schedule("1f1b", num_ranks=2, num_microbatches=2)))
    1f1b: makespan 9, idle 33.3%
    rank 0  0F0 0F1 .   .   0BW0--- .   0BW1---
    rank 1  .   1F0 1BW0--- 1F1 1BW1--- .   .
    """
    if isinstance(schedule, Schedule):
        schedule = simulate(schedule, graph, costs=costs, latency=latency)
    terminal = sys.stdout.isatty()
    if width == 0:
        width = shutil.get_terminal_size().columns if terminal else sys.maxsize
    return _draw(schedule, width, terminal if color is None else color)


def _draw(simulation: Simulation, width: int, color: bool) -> str:
    rows = _blocks(simulation)
    cell = max((-(-(len(b.text) + 1) // b.length) for row in rows for b in row), default=2)
    columns = max((b.start + b.length for row in rows for b in row), default=0)
    labels = [simulation.graph.label(row) for row in range(len(rows))]
    margin = max(map(len, labels)) + 2
    band = max(1, (width - margin) // cell)
    drawn: list[str] = [
        f"{simulation.schedule.name}: makespan {simulation.makespan:g}, "
        f"idle {simulation.bubble_share:.1%}"
    ]
    for left in range(0, columns, band):
        right = min(columns, left + band)
        drawn += [""] if left else []
        for label, row in zip(labels, rows, strict=True):
            line = "".join(_pieces(row, left, right, cell, color))
            drawn.append((label.ljust(margin) + line).rstrip())
    return "\n".join(drawn)


def _blocks(simulation: Simulation) -> list[list[_Block]]:
    lengths = [e - s for s, e in zip(simulation.starts, simulation.ends, strict=True)]
    unit = min((length for length in lengths if length > 0.0), default=1.0)
    placement = simulation.schedule.placement
    chunk = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    rows: list[list[_Block]] = [[] for _ in range(simulation.graph.num_rows)]
    for (row, what), begin, length in zip(
        simulation.order, simulation.starts, lengths, strict=True
    ):
        taken = rows[row][-1].start + rows[row][-1].length if rows[row] else 0
        start = max(taken, round(begin / unit))
        rows[row].append(
            _Block(str(what), start, max(1, round(length / unit)), _color(what, chunk))
        )
    return rows


def _color(what: Action | Pair | TaskRun, chunk: list[int]) -> int:
    match what:
        case Action(kind, stage, _):
            return _COLORS[kind][chunk[stage] % 2]
        case Pair():
            return _PAIR_COLOR
        case TaskRun():
            return _TASK_COLOR


def _pieces(row: list[_Block], left: int, right: int, cell: int, color: bool) -> list[str]:
    """The text of the columns from `left` to `right`; blocks are cut at the edges."""
    pieces: list[str] = []
    at = left
    for block in row:
        start, end = max(block.start, left), min(block.start + block.length, right)
        if start >= end:
            continue
        pieces.append(".".ljust(cell) * (start - at))
        whole = block.text.ljust(block.length * cell - 1, "-" if block.length > 1 else " ") + " "
        text = whole[(start - block.start) * cell : (end - block.start) * cell]
        body = text.rstrip()
        gap = " " * (len(text) - len(body))
        pieces.append(f"\033[30;{block.color}m{body}\033[0m{gap}" if color else text)
        at = end
    pieces.append(".".ljust(cell) * (right - at))
    return pieces
