"""What a step does and how long it takes: measured against theoretical.

timeline = debug.measure(train_step, state, batch)
print(timeline)
"""

from multimesh._src.report.timeline.calls import (
    Call as Call,
    SubmeshTimes as SubmeshTimes,
    TaskTimes as TaskTimes,
)
from multimesh._src.report.timeline.comparison import Comparison as Comparison
from multimesh._src.report.timeline.events import Event as Event, Waits as Waits
from multimesh._src.report.timeline.timeline import Timeline as Timeline
from multimesh._src.runtime.counters import Counters as Counters, counting as counting
from multimesh._src.staging.measuring import (
    measure as measure,
    passes as passes,
    record as record,
)

__all__ = [
    "Call",
    "Comparison",
    "Counters",
    "Event",
    "SubmeshTimes",
    "TaskTimes",
    "Timeline",
    "Waits",
    "counting",
    "measure",
    "passes",
    "record",
]
