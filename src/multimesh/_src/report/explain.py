"""Shows a `ProgramReport`: plain text for logs and tests, tables for terminals.

`str(staged.explain())` is the text, `rich.print(staged.explain())` the tables.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from multimesh._src.report.tables import Table, amount, merge_rows
from multimesh._src.schedule.grid import grid

if TYPE_CHECKING:
    from multimesh._src.report.program import LoopReport, ProgramReport, TaskReport

WIDTH = 100
MAX_DRAWN_MICROBATCHES = 64
"""Longer loops are summarised, not drawn."""


def as_text(report: "ProgramReport") -> str:
    """Returns the report as plain text, without trailing blanks."""
    parts = [summary(report)]
    parts += [table.as_text() for table in tables(report)]
    for loop in report.loops:
        drawn = textwrap.indent(_drawing(loop, WIDTH - 2, color=False), "  ")
        parts.append(f"{_loop_title(loop)}\n{drawn}".rstrip())
        for remark in _remarks(loop):
            parts[-1] += "".join(f"\n  {line}" for line in textwrap.wrap(remark, WIDTH - 2))
    return "\n\n".join(parts)


def as_rich(report: "ProgramReport", width: int) -> Iterator[RenderableType]:
    """Yields what rich prints."""
    yield Text(summary(report))
    for table in tables(report):
        yield Text()
        yield table.as_rich()
    for loop in report.loops:
        yield Text()
        yield Text(_loop_title(loop), style="bold")
        yield Text.from_ansi(_drawing(loop, width, color=True))
        yield from map(Text, _remarks(loop))


def summary(report: "ProgramReport") -> str:
    """Returns the size of the program in two sentences."""
    num_runs = _count(sum(task.num_runs for task in report.tasks), "run")
    num_copies = _count(report.num_copies, "copy", "copies")
    num_values = _count(sum(reshard.copies for reshard in report.reshards), "value")
    crossing = amount(sum(reshard.bytes for reshard in report.reshards), "B")
    counts = (
        _count(len(report.tasks), "task"),
        _count(len(report.submeshes), "submesh", "submeshes"),
        _count(report.num_executables, "program"),
    )
    return (
        f"{report.name}: {counts[0]} on {counts[1]}, {counts[2]}.\n"
        f"One call: {num_runs} of tasks, {num_copies} with {num_values}, "
        f"{crossing} between devices."
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def tables(report: "ProgramReport") -> Iterator[Table]:
    """Yields the tables that have rows."""
    made = (_submeshes(report), _tasks(report), _reshards(report), _arguments(report))
    return (table for table in made if table.rows)


def _submeshes(report: "ProgramReport") -> Table:
    rows = tuple(
        (s.label, s.devices, s.axes or "-", amount(s.argument_bytes, "B"), amount(s.flops, "FLOP"))
        for s in report.submeshes
    )
    return Table("Submeshes", ("submesh", "devices", "axes", ">arguments", ">work a call"), rows)


def _tasks(report: "ProgramReport") -> Table:
    rows = [
        (
            (task.label,),
            _action(task),
            task.submesh,
            str(task.num_runs),
            amount(task.flops, "FLOP"),
            f"{task.num_inputs}, {amount(task.input_bytes, 'B')}",
            f"{task.num_outputs}, {amount(task.output_bytes, 'B')}",
            f"{len(task.parameters)}, {amount(task.parameter_bytes, 'B')}",
            str(task.num_in_place),
        )
        for task in report.tasks
    ]
    columns = ("task", "action", "submesh", ">runs", ">work a run", ">reads", ">makes")
    return Table(
        "Tasks",
        (*columns, ">arguments", ">in place"),
        merge_rows(rows),
        note="arguments: those of the reads that are arguments of the function; in place: results "
        "written over what the task reads. Sizes are of whole arrays, operations are estimates. "
        "`main` is what stands in no scope of a task.",
    )


def _action(task: "TaskReport") -> str:
    return f"{task.stage}{task.kind}" if task.stage >= 0 else task.kind


def _reshards(report: "ProgramReport") -> Table:
    rows = [
        (
            (reshard.value,),
            reshard.type,
            reshard.edge,
            tuple(reshard.target.split(", ")),
            str(reshard.copies),
            amount(reshard.bytes, "B"),
        )
        for reshard in report.reshards
    ]
    return Table(
        "Reshards (in one call)",
        ("value", "type", "from -> to", "read by", ">copies", ">bytes"),
        merge_rows(rows),
        note="bytes: what the target devices lack; 0 B is a view of what lies there already.",
    )


def _arguments(report: "ProgramReport") -> Table:
    rows = []
    for a in report.arguments:
        remarks = [f"in {a.microbatches} microbatches"] if a.microbatches else []
        remarks += ["donated"] if a.donated else []
        remarks += [f"returned as {name}" for name in a.returned_as]
        rows.append(
            ((a.name,), a.type, a.home or "-", a.layout or "-", a.moved, ", ".join(remarks))
        )
    return Table(
        "Arguments",
        ("argument", "type", "lives on", "layout", "moved", ""),
        merge_rows(rows),
        note="moved: for arguments that lie as they did when the function was traced; `first call` "
        "means that the result that takes the argument's place comes back where it is wanted.",
    )


def _loop_title(loop: "LoopReport") -> str:
    if loop.length == 0:
        return f"While loop: {', '.join(_named(loop))}"
    kind = "sequential loop" if loop.simulation is None else "microbatch loop"
    return f"Schedule of a {kind}: {loop.length} x {', '.join(_named(loop))}"


def _named(loop: "LoopReport") -> tuple[str, ...]:
    shown = loop.tasks[:4]
    return (*shown, f"and {len(loop.tasks) - 4} more") if len(loop.tasks) > 4 else shown


def _remarks(loop: "LoopReport") -> Iterator[str]:
    """Says what the schedule keeps, and which stages keep B and W together against it (S3)."""
    peaks = None if loop.simulation is None else loop.simulation.peaks
    if peaks is not None and any(peaks.until_w):
        sets = f"at most {_by_rank(peaks.until_b)} residual sets"
        if peaks.until_w != peaks.until_b:
            sets += f" until B, {_by_rank(peaks.until_w)} until W"
        sizes = ", ".join(amount(int(size), "B") for size in peaks.num_bytes)
        yield f"By rank: {sets}; with {sizes}, of whole arrays."
    if loop.whole:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(loop.whole))
        yield (
            f"Not split into B and W, because the contractions stand inside a scan: {names}. "
            "Write the layers of a stage out, or take a schedule without W."
        )


def _by_rank(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _drawing(loop: "LoopReport", width: int, *, color: bool) -> str:
    if loop.length == 0:
        return (
            "The host reads the condition before each iteration; every number above counts one "
            "iteration."
        )
    if loop.simulation is None:
        return "one iteration after the other"
    if loop.simulation.schedule.num_microbatches > MAX_DRAWN_MICROBATCHES:
        s = loop.simulation
        return f"{s.schedule.name}: makespan {s.makespan:g}, idle {s.bubble_share:.1%}"
    return grid(loop.simulation, width=width, color=color)
