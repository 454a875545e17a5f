"""`Timeline`: what was measured, and the ways to look at it.

timeline = measure(train_step, state, batch)
print(timeline)                       tables: who is busy, who waits and why, what to change
print(timeline.grid())                the measured schedule, drawn over time
timeline.save("step.json")            for https://ui.perfetto.dev
timeline.plot("step.png")             measured above simulated
auto(costs=timeline.costs())          a schedule chosen by measured times
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from rich.console import Console, ConsoleOptions, RenderResult

from multimesh._src.errors import DebugError, message
from multimesh._src.report.timeline import chart, drawing, tables, trace_file
from multimesh._src.report.timeline.calls import (
    Call,
    MeasuredStep,
    SubmeshTimes,
    TaskTimes,
    copy_means,
    faster_half,
    make_call,
    measured_step,
    submesh_times,
    task_times,
)
from multimesh._src.report.timeline.comparison import Comparison, compare_loop
from multimesh._src.report.timeline.events import Event
from multimesh._src.runtime.timing import CallTimes
from multimesh._src.schedule.costs import Costs


@final
@dataclass(slots=True, repr=False, eq=False)
class Timeline:
    """The measured calls of one or several steps.

    A run is taken to start as soon as its devices are free, its inputs are there and the host has
    begun to enqueue it, whichever is last, and to end when it is seen to have ended. Printed, it is
    a set of tables; `rich.print` shows them in colour.
    """

    _recorded: list[tuple[MeasuredStep, CallTimes, bool]] = field(default_factory=list)

    # --- calls ----------------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[Call, ...]:
        """All measured calls, in order; those run alone among them."""
        found = []
        for step in dict.fromkeys(step for step, _, _ in self._recorded):
            mine = [(times, alone) for other, times, alone in self._recorded if other is step]
            means = copy_means(step, mine)
            found += [make_call(step, times, alone, means) for times, alone in mine]
        return tuple(sorted(found, key=lambda call: call.began))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps that were called."""
        return tuple(dict.fromkeys(step.name for step, _, _ in self._recorded))

    def only(self, name: str) -> "Timeline":
        """The calls of the step of this name.

        Raises:
            DebugError: No such step was recorded.
        """
        kept = [entry for entry in self._recorded if entry[0].name == name]
        if not kept:
            known = ", ".join(f"`{other}`" for other in self.names) or "none"
            raise DebugError(f"No call of `{name}` was recorded; recorded are: {known}.")
        return Timeline(kept)

    @property
    def call(self) -> Call:
        """The typical call: of the last step, the one of median duration.

        Raises:
            DebugError: Nothing was recorded.
        """
        together, alone = self._last_step()
        return faster_half(together or alone)[-1]

    @property
    def events(self) -> tuple[Event, ...]:
        """The runs and copies of the typical call."""
        return self.call.events

    def _last_step(self) -> tuple[list[Call], list[Call]]:
        """The calls of the step that was called last: as always, and alone."""
        if not self._recorded:
            raise DebugError(
                message(
                    "Nothing was recorded: no step of MultiMesh ran.",
                    ways=(
                        "call a function of `mjit`, of `parallelize`, or a `jax.jit` inside a "
                        "context, in the thread that records.",
                        "see by `mjit(f).lower(...).explain()` whether the function has tasks: "
                        "without them it is plain JAX, which `jax.profiler` shows.",
                    ),
                )
            )
        step = self._recorded[-1][0]
        calls = [call for call in self.calls if call.step is step]
        return [c for c in calls if not c.alone], [c for c in calls if c.alone]

    # --- numbers --------------------------------------------------------------------------------

    @property
    def submeshes(self) -> tuple[SubmeshTimes, ...]:
        """What each submesh did in the typical call."""
        return submesh_times(self.call)

    @property
    def tasks(self) -> tuple[TaskTimes, ...]:
        """Times of all tasks, then of the copies along each edge, in the faster half of calls."""
        return task_times(*map(faster_half, self._last_step()))

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every microbatch loop of the step as measured and by its schedule."""
        together, alone = self._last_step()
        calls = faster_half(together or alone)
        found = (compare_loop(calls, loop) for loop in sorted(calls[0].step.schedules))
        return tuple(comparison for comparison in found if comparison is not None)

    def costs(self, *, alone: bool = False) -> Costs:
        """The mean times of the actions of the first microbatch loop, in seconds.

        They serve `schedules.auto`, `simulate`, `compare` and `grid`. Where B and W ran as one
        action each of them is given half of its time.

        Args:
            alone: Whether to take the times of the runs by themselves.

        Raises:
            DebugError: The step has no microbatch loop that runs once in each call, or was not
                measured so.
        """
        return self._comparison(alone=alone).costs

    def latency(self, *, alone: bool = False) -> float:
        """The mean time of copies between the actions of the first microbatch loop, in seconds."""
        return self._comparison(alone=alone).mean_latency

    def _comparison(self, *, alone: bool) -> Comparison:
        calls = faster_half(self._last_step()[alone])
        if not calls:
            raise DebugError(
                message(
                    f"No call of `{self.call.name}` was measured {'alone' if alone else 'as usual'}"
                    ".",
                    ways=("`measure` takes both; `record(alone=...)` one of them.",),
                )
            )
        loops = sorted(calls[0].step.schedules)
        found = compare_loop(calls, loops[0]) if loops else None
        if found is None:
            raise DebugError(
                f"`{self.call.name}` has no microbatch loop that runs once in each call, so there "
                "is no schedule to compare with."
            )
        return found

    # --- to look at -----------------------------------------------------------------------------

    def table(self) -> "tables.Tables":
        """Tables of submeshes, tasks, copies and loops, and what to change. Can be printed.

        Raises:
            DebugError: Nothing was recorded.
        """
        return tables.make_tables(self)

    def grid(self, *, width: int = 0, color: bool | None = None) -> str:
        """Draws the typical call over time, one line a submesh.

        Args:
            width: Characters a line; by default those of the terminal, else 100.
            color: Whether to colour runs; by default if standard output is a terminal.

        Raises:
            DebugError: Nothing was recorded.
        """
        return drawing.draw(self.call, width, color)

    def save(self, path: str | Path) -> None:
        """Writes all calls as a trace for https://ui.perfetto.dev or `chrome://tracing`.

        There is a track for each submesh, for the copies along each edge, and for the host.

        Raises:
            DebugError: Nothing was recorded.
        """
        self._last_step()
        trace_file.write(self.calls, Path(path))

    def plot(self, path: str | Path) -> None:
        """Draws the typical call, and below it its simulated schedule, into an image file.

        Raises:
            DebugError: Nothing was recorded, or matplotlib is not installed.
        """
        comparisons = self.comparisons
        chart.plot(self.call, comparisons[0].simulation if comparisons else None, Path(path))

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<timeline of {len(self._recorded)} calls of {', '.join(self.names) or 'nothing'}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table()


@final
@dataclass(slots=True, eq=False)
class Recorder:
    """Puts the times of calls into a timeline (see `runtime.timing`)."""

    timeline: Timeline
    alone: bool
    _steps: dict[int, tuple[Any, MeasuredStep]] = field(default_factory=dict)

    def add(self, compiled: Any, times: CallTimes) -> None:
        """Takes the times of one call of a `CompiledPlan`."""
        if id(compiled) not in self._steps:  # its plan is kept, so that the id stays its own
            self._steps[id(compiled)] = compiled, measured_step(compiled)
        self.timeline._recorded.append((self._steps[id(compiled)][1], times, self.alone))
