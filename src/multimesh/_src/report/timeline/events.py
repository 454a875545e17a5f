"""Events: when each run and copy of a call took place, and why a submesh waited before it.

stage=1   ...[1F0]..........~~~~h[1F1]        .  for a task on another submesh
             ^     ^        ^   ^^            ~  for a copy on its way
          its end  |        |   ||            h  for the host to enqueue
             stage=0 ends 0F1   |start
                       the copy arrives
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multimesh._src.report.timeline.steps import StepInfo
from multimesh._src.runtime.timing import CallTimes, StepTimes


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a submesh waited: for tasks of others, for copies, and for the host."""

    task: float = 0.0
    copy: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return self.task + self.copy + self.host


@dataclass(frozen=True, slots=True)
class Event:
    """One run of a task, or one copy. Times are in seconds from the beginning of the call.

    Attributes:
        info: What it is.
        step: Its position in the plan.
        begin: When the host began to enqueue it.
        enqueued: When the host was done with that.
        start: The earliest that it can have started.
        end: When it was seen to have ended; of a copy that cannot be seen, an estimate.
        waits: Why its submesh waited since what it ran before.
    """

    info: StepInfo
    step: int
    begin: float
    enqueued: float
    start: float
    end: float
    waits: Waits = Waits()

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start

    @property
    def label(self) -> str:
        """The name of the task, or the edge of a copy."""
        return self.info.label

    @property
    def kind(self) -> str:
        """`F`, `B`, `W`, `BW`, of fused tasks `F+BW`; `-` if it is none of them; `copy`."""
        return self.info.kind

    @property
    def stage(self) -> int:
        """Its stage, -1 where it is no action of a pipeline."""
        return self.info.stage

    @property
    def microbatch(self) -> int:
        """The iteration of its loop, -1 outside of loops."""
        return self.info.microbatch

    @property
    def submesh(self) -> str:
        """The label of its submesh; of a copy, where it goes."""
        return self.info.submesh

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy, not a run of a task."""
        return self.info.is_copy

    @property
    def action(self) -> str:
        """Its action, as `1F0`, `1F+BW0` or `[0F3|7BW1]`; outside of pipelines its label."""
        return self.info.action


def events_alone(infos: Sequence[StepInfo], times: CallTimes) -> tuple[Event, ...]:
    """Events of a call whose steps ran one after the other: each starts when it is enqueued."""
    return tuple(
        Event(
            infos[t.step],
            t.step,
            t.begin - times.begin,
            t.enqueued - times.begin,
            t.begin - times.begin,
            t.end - times.begin,
        )
        for t in times.steps
    )


def events_together(
    infos: Sequence[StepInfo], times: CallTimes, copy_seconds: Mapping[str, float]
) -> tuple[Event, ...]:
    """Events of a call as it always runs.

    Args:
        infos: What each step of the plan is.
        times: The times that were taken.
        copy_seconds: How long a copy along an edge takes, for copies that were not seen to end.
    """
    clock = _Clock(infos, times.begin, copy_seconds)
    return tuple(clock.event(step) for step in times.steps)


class _Clock:
    """Goes through the steps in the order of enqueueing."""

    def __init__(
        self, infos: Sequence[StepInfo], begin: float, copy_seconds: Mapping[str, float]
    ) -> None:
        self._infos, self._begin, self._copy_seconds = infos, begin, copy_seconds
        self._free: dict[int, float] = {}  # by device
        # by step: when its results were there, and when the run that made them had ended
        self._there: dict[int, float] = {}
        self._made: dict[int, float] = {}
        self._sent: dict[int, float] = {}  # when a copy was on its way

    def event(self, times: StepTimes) -> Event:
        info = self._infos[times.step]
        begin, enqueued = times.begin - self._begin, times.enqueued - self._begin
        last = max(info.needs, key=lambda n: self._there[n], default=-1)
        arrived = self._there.get(last, 0.0)
        if info.is_copy:
            start = max(arrived, begin)
            guess = start + self._copy_seconds.get(info.label, 0.0)
            end = max(start, times.end - self._begin) if times.seen else guess
            self._there[times.step], self._sent[times.step] = end, start
            self._made[times.step] = self._made.get(last, 0.0)
            return Event(info, times.step, begin, enqueued, start, end)
        free = max((self._free.get(device, 0.0) for device in info.devices), default=0.0)
        # what the waiting threads see late must not make a run end before it starts
        end = max(times.end - self._begin, begin, free)
        start = min(max(free, arrived, begin), end)
        self._free.update(dict.fromkeys(info.devices, end))
        self._there[times.step] = self._made[times.step] = end
        waits = self._waits(free, start, last)
        return Event(info, times.step, begin, enqueued, start, end, waits)

    def _waits(self, free: float, start: float, last: int) -> Waits:
        """Cuts the time from `free` to `start` by what was still missing; `last` arrived last."""
        made = self._made.get(last, 0.0)
        arrived = self._there.get(last, 0.0)
        sent = self._sent.get(last, arrived)
        cuts = [min(max(at, free), start) for at in (made, sent, arrived)]
        task, late, copy = cuts[0] - free, cuts[1] - cuts[0], cuts[2] - cuts[1]
        return Waits(task, copy, late + (start - cuts[2]))
