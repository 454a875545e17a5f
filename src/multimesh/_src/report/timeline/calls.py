"""Calls: the events of one call of a step, and sums over submeshes, tasks and edges.

train_step, 41.2 ms     stage=0   busy 70 %, waited 18 % for tasks, 1 % for copies, 2 % host
                        stage=1   ...
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from multimesh._src.report.timeline.events import (
    Event,
    Waits,
    events_alone,
    events_together,
)
from multimesh._src.report.timeline.steps import StepInfo, describe_steps
from multimesh._src.runtime.timing import CallTimes
from multimesh._src.schedule.simulate import Simulation


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStep:
    """A compiled step that was measured.

    Attributes:
        name: The name of the function.
        infos: What each step of its plan is.
        schedules: The simulation of each pipelined loop, by the loop's index.
        submeshes: The labels of its submeshes, in order.
    """

    name: str
    infos: tuple[StepInfo, ...]
    schedules: Mapping[int, Simulation]
    submeshes: tuple[str, ...]


def measured_step(compiled: Any) -> MeasuredStep:
    """Describes a `CompiledPlan`."""
    partitioned = compiled.partitioned
    infos = describe_steps(compiled.buffered.plan, partitioned)
    used = dict.fromkeys(info.submesh for info in infos if not info.is_copy)
    known = () if partitioned is None else partitioned.program.submeshes
    ordered = [submesh.label for submesh in known if submesh.label in used]
    submeshes = tuple(dict.fromkeys((*ordered, *used)))
    schedules = {} if partitioned is None else partitioned.schedules
    return MeasuredStep(compiled.name, infos, schedules, submeshes)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One measured call.

    Attributes:
        step: What was called.
        events: Its runs and copies in the order in which the host enqueued them.
        began: When it began, in seconds of `time.perf_counter`.
        duration: Seconds until everything had run.
        alone: Whether each run and copy was waited for before the next one.
    """

    step: MeasuredStep
    events: tuple[Event, ...]
    began: float
    duration: float
    alone: bool

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.step.name

    @property
    def runs(self) -> tuple[Event, ...]:
        """The events that are runs of tasks."""
        return tuple(event for event in self.events if not event.is_copy)

    @property
    def copies(self) -> tuple[Event, ...]:
        """The events that are copies."""
        return tuple(event for event in self.events if event.is_copy)


def make_call(
    step: MeasuredStep, times: CallTimes, alone: bool, copy_seconds: Mapping[str, float]
) -> Call:
    """Lays out the events of a call; see `events_together`."""
    if alone:
        events = events_alone(step.infos, times)
    else:
        events = events_together(step.infos, times, copy_seconds)
    duration = max((max(e.end, e.enqueued) for e in events), default=times.end - times.begin)
    return Call(step, events, times.begin, duration, alone)


def copy_means(step: MeasuredStep, recorded: Iterable[tuple[CallTimes, bool]]) -> dict[str, float]:
    """How long the copies of each edge take that were seen to end; those alone say it best."""
    found: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for times, alone in recorded:
        seen = {t.step for t in times.steps if t.seen}
        for event in make_call(step, times, alone, {}).copies:
            if event.step in seen:
                found[alone].setdefault(event.label, []).append(event.duration)
    best = {**found[False], **found[True]}
    return {edge: fmean(seconds) for edge, seconds in best.items()}


@dataclass(frozen=True, slots=True)
class SubmeshTimes:
    """Seconds of one call on one submesh.

    Attributes:
        label: The submesh.
        busy: Its tasks ran.
        waits: It waited, with more to do.
        done: It had nothing left to do.
        others: Tasks of overlapping submeshes ran on its devices.
    """

    label: str
    busy: float
    waits: Waits
    done: float
    others: float


def submesh_times(call: Call) -> tuple[SubmeshTimes, ...]:
    """What each submesh did during a call."""
    return tuple(_submesh_times(call, label) for label in call.step.submeshes)


def _submesh_times(call: Call, label: str) -> SubmeshTimes:
    mine = [event for event in call.runs if event.submesh == label]
    busy = sum(event.duration for event in mine)
    waits = Waits(
        sum(event.waits.task for event in mine),
        sum(event.waits.copy for event in mine),
        sum(event.waits.host for event in mine),
    )
    last = max((event.end for event in mine), default=0.0)
    done = call.duration - last
    return SubmeshTimes(label, busy, waits, done, max(0.0, last - busy - waits.total))


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """Seconds of one task, or of the copies along one edge, in several calls.

    Attributes:
        info: One of its steps.
        num_runs: Runs in one call.
        mean: The mean time of a run, while other submeshes run too.
        longest: The longest run.
        alone: The mean time of a run by itself; 0 if that was not measured.
    """

    info: StepInfo
    num_runs: int
    mean: float
    longest: float
    alone: float

    @property
    def total(self) -> float:
        """Seconds of all its runs in one call."""
        return self.mean * self.num_runs


def faster_half(calls: Sequence[Call]) -> list[Call]:
    """The calls that are no slower than the median one, which is the last.

    Means are taken over them: over whole calls, because what a thread sees late lengthens one run
    and shortens the next, and not over the slowest, in which something else kept the machine busy.
    """
    return sorted(calls, key=lambda call: call.duration)[: (len(calls) + 1) // 2]


def task_times(together: Sequence[Call], alone: Sequence[Call]) -> tuple[TaskTimes, ...]:
    """Times of every task, then of every edge, in the order in which they first run."""
    durations = _durations(together or alone)
    by_itself = _durations(alone)
    num_calls = len(together or alone)
    found = [
        TaskTimes(
            info,
            len(times) // num_calls,
            fmean(times),
            max(times),
            fmean(by_itself[key][1]) if key in by_itself else 0.0,
        )
        for key, (info, times) in durations.items()
    ]
    return tuple(sorted(found, key=lambda task: task.info.is_copy))


def _durations(calls: Sequence[Call]) -> dict[tuple[str, bool], tuple[StepInfo, list[float]]]:
    found: dict[tuple[str, bool], tuple[StepInfo, list[float]]] = {}
    for event in (event for call in calls for event in call.events):
        key = (event.label, event.is_copy)
        found.setdefault(key, (event.info, []))[1].append(event.duration)
    return found
