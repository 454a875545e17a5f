"""Tables of a timeline: who was busy, who waited and for what, what a loop's time is made of."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from multimesh._src.report.tables import Table, duration, share
from multimesh._src.report.timeline.advice import advise
from multimesh._src.report.timeline.calls import SubmeshTimes, TaskTimes
from multimesh._src.report.timeline.comparison import Comparison

if TYPE_CHECKING:
    from multimesh._src.report.timeline.timeline import Timeline

WIDTH = 98


@dataclass(frozen=True, slots=True, repr=False)
class Tables:
    """Tables to be printed: as plain text, or by rich.

    Attributes:
        heading: What was measured.
        tables: The tables.
        advice: What to change, one sentence each.
    """

    heading: str
    tables: tuple[Table, ...]
    advice: tuple[str, ...]

    def as_text(self) -> str:
        """The tables as plain text."""
        return "\n\n".join((self.heading, *(t.as_text() for t in self.tables), *self._advice()))

    def _advice(self) -> Iterator[str]:
        if self.advice:
            wrapped = (
                textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
                for text in self.advice
            )
            yield "\n".join(("What to change", *wrapped))

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading)
        for table in self.tables:
            yield Text()
            yield table.as_rich(options.max_width)
        if self.advice:
            yield Text()
            yield Text("What to change", style="bold")
            yield from (Text(f"- {sentence}") for sentence in self.advice)


def make_tables(timeline: "Timeline") -> Tables:
    """Makes the tables of the step that was called last."""
    call, tasks, submeshes = timeline.call, timeline.tasks, timeline.submeshes
    comparisons = timeline.comparisons
    made = [_submeshes(submeshes, call.duration), _tasks(tasks), _copies(tasks)]
    made += map(_comparison, comparisons)
    tables = tuple(table for table in made if table.rows)
    return Tables(_heading(timeline), tables, advise(call, tasks, submeshes, comparisons))


def _heading(timeline: "Timeline") -> str:
    call = timeline.call
    same = [c for c in timeline.calls if c.step is call.step]
    times = [c.duration for c in same if c.alone is call.alone]
    how = ", each run by itself" if call.alone else ""
    shown = duration(call.duration)
    if len(times) == 1:
        return f"{call.name}: one call of {shown}{how}."
    low, high = duration(min(times)), duration(max(times))
    return (
        f"{call.name}: {len(times)} calls of {low} to {high}{how}. Shown is one of {shown}; means "
        "are over those no slower."
    )


def _submeshes(submeshes: tuple[SubmeshTimes, ...], whole: float) -> Table:
    others = any(s.others > 0.005 * whole for s in submeshes)
    rows = [
        (
            s.label,
            share(s.busy, whole),
            share(s.waits.task, whole),
            share(s.waits.copy, whole),
            share(s.waits.host, whole),
            share(s.done, whole),
            *((share(s.others, whole),) if others else ()),
        )
        for s in submeshes
    ]
    columns = ("submesh", ">busy", ">task", ">copy", ">host", ">done", ">others")
    return Table(
        "Submeshes (shares of the call)",
        columns if others else columns[:-1],
        tuple(rows),
        note="task, copy, host: waited for a task on another submesh, for a copy on its way, for "
        "the host to enqueue; done: had nothing left to do"
        + ("; others: tasks of overlapping submeshes ran." if others else "."),
    )


def _tasks(tasks: tuple[TaskTimes, ...]) -> Table:
    runs = [task for task in tasks if not task.info.is_copy]
    total = sum(task.total for task in runs)
    rows = tuple(
        (
            task.info.label,
            task.info.part,
            task.info.submesh,
            str(task.num_runs),
            duration(task.mean),
            duration(task.longest),
            duration(task.alone) if task.alone else "-",
            share(task.total, total),
        )
        for task in runs
    )
    columns = ("task", "action", "submesh", ">runs", ">a run", ">longest", ">alone", ">share")
    return Table(
        "Tasks",
        columns,
        rows,
        note="a run: the mean; alone: when nothing else runs; share: of all runs of a call.",
    )


def _copies(tasks: tuple[TaskTimes, ...]) -> Table:
    rows = tuple(
        (
            task.info.label,
            str(task.num_runs),
            duration(task.mean),
            duration(task.alone) if task.alone else "-",
        )
        for task in tasks
        if task.info.is_copy
    )
    return Table("Copies", ("from -> to", ">copies", ">a copy", ">alone"), rows)


def _comparison(comparison: Comparison) -> Table:
    simulation, measured = comparison.simulation, comparison.measured
    rows = [
        (name, duration(seconds), share(seconds, measured)) for name, seconds in comparison.parts
    ]
    rows.append(("the loop, measured", duration(measured), share(measured, measured)))
    schedule = simulation.schedule
    return Table(
        f"Loop of `{schedule.name}`, {schedule.num_microbatches} microbatches",
        ("what its time is made of", ">time", ">share"),
        tuple(rows),
        note=f"Simulated with these times and copies the loop takes "
        f"{duration(simulation.makespan)} and its ranks are idle {simulation.bubble_share:.0%}; "
        f"measured {duration(measured)} and {comparison.measured_bubble:.0%}.",
    )
