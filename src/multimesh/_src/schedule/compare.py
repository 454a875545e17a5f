"""`compare`: schedules side by side, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from multimesh._src.schedule.costs import NO_MEMORY, UNIT, Costs, Latency, Memory
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from rich.table import Table


def compare(
    schedules: Sequence[Schedule | Simulation],
    graph: StageGraph | None = None,
    *,
    costs: Costs | Mapping[str, float] = UNIT,
    latency: Latency = 0.0,
    memory: Memory = NO_MEMORY,
) -> Table:
    """A table of makespan, bubbles and peak memory, one row a schedule.

    The span bubble is the idle time of a rank between its own first and last action, the makespan
    bubble the idle time in the whole makespan; of both the largest over the ranks is shown.

    Args:
        schedules: Schedules, which are simulated with the other arguments, or simulations.
        graph: The program's stage graph; the textbook chain by default.
        costs: See `simulate`.
        latency: See `simulate`.
        memory: See `simulate`; adds a column of bytes.

    Returns:
        A `rich` table, to be printed with `rich.print`.

    Raises:
        ScheduleError: A schedule does not run to its end.

    >>> names = ("gpipe", "1f1b", "zb-h1")
    >>> table = compare([make_schedule(n, num_ranks=4, num_microbatches=8) for n in names])
    >>> table.row_count
    3
    """
    from rich.table import Table

    has_bytes = memory is not NO_MEMORY
    table = Table("schedule", title="schedules compared")
    numbers = ("makespan", "span bubble", "makespan bubble", "idle", "sets until B", "until W")
    for name in (*numbers, *(("peak bytes",) if has_bytes else ())):
        table.add_column(name, justify="right")
    for given in schedules:
        simulation = (
            given
            if isinstance(given, Simulation)
            else simulate(given, graph, costs=costs, latency=latency, memory=memory)
        )
        cells = _cells(simulation)
        table.add_row(*(cells if has_bytes else cells[:-1]))
    return table


def _cells(simulation: Simulation) -> tuple[str, ...]:
    peaks = simulation.peaks
    return (
        simulation.schedule.name,
        f"{simulation.makespan:g}",
        f"{simulation.span_bubble:g}",
        f"{simulation.makespan_bubble:g}",
        f"{simulation.bubble_share:.1%}",
        str(max(peaks.until_b)),
        str(max(peaks.until_w)),
        f"{max(peaks.num_bytes):.4g}",
    )
