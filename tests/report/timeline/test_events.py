"""When runs start and why submeshes wait: worked out by hand on four steps."""

import pytest

from multimesh._src.report.timeline.calls import MeasuredStep, copy_means, make_call, submesh_times
from multimesh._src.report.timeline.events import Waits, events_alone, events_together
from multimesh._src.report.timeline.steps import StepInfo
from multimesh._src.runtime.timing import CallTimes, StepTimes


def run(label, microbatch, device, needs=(), stage=0):
    return StepInfo(label, "F", stage, microbatch, f"stage={device}", (device,), needs)


def copy(needs, source=0, target=1):
    edge = f"stage={source} -> stage={target}"
    return StepInfo(edge, "copy", -1, 0, f"stage={target}", (), needs)


# stage 0 runs twice, the first result goes to stage 1
INFOS = (run("a", 0, 0), copy((0,)), run("b", 0, 1, (1,), stage=1), run("a", 1, 0))


def times(*rows, began=0.0):
    """Rows of (begin, enqueued, end); without an end it was not seen."""
    steps = [
        StepTimes(i, began + row[0], began + row[1], began + row[-1], seen=len(row) == 3)
        for i, row in enumerate(rows)
    ]
    return CallTimes(began, began + max(row[-1] for row in rows), tuple(steps))


def rounded(waits):
    return tuple(round(x, 9) for x in (waits.task, waits.copy, waits.host))


def test_a_run_waits_for_a_task_then_for_a_copy():
    found = events_together(
        INFOS, times((1, 2, 10), (2, 3, 12), (3, 4, 20), (4, 5, 19), began=50.0), {}
    )
    assert [(e.action, e.start, e.end) for e in found] == [
        ("0F0", 1, 10),
        ("stage=0 -> stage=1", 10, 12),
        ("1F0", 12, 20),
        ("0F1", 10, 19),
    ]
    assert rounded(found[0].waits) == (0, 0, 1), "the host comes first"
    assert rounded(found[2].waits) == (10, 2, 0)
    assert found[3].waits == Waits()


def test_a_run_waits_for_the_host():
    found = events_together(INFOS, times((1, 2, 3), (6, 7, 8), (11, 12, 20), (12, 13, 19)), {})
    assert (found[1].start, found[2].start) == (6, 11)
    # until 3 for the task; until 6 the copy was not enqueued; until 8 it was on its way
    assert rounded(found[2].waits) == (3, 2, 6)
    assert rounded(found[3].waits) == (0, 0, 9)


def test_a_copy_that_is_not_seen_takes_as_long_as_others():
    taken = times((1, 2, 10), (2, 3), (3, 4, 20), (4, 5, 19))
    assert events_together(INFOS, taken, {})[2].start == 10
    found = events_together(INFOS, taken, {"stage=0 -> stage=1": 4.0})
    assert (found[1].end, found[2].start) == (14, 14)
    assert rounded(found[2].waits) == (10, 4, 0)


def test_ends_that_are_seen_late_turn_nothing_round():
    """Stage 1 is seen to end before what it waited for: the threads came to the clock late."""
    found = events_together(INFOS, times((1, 2, 10), (2, 3, 15), (3, 4, 14), (4, 5, 9)), {})
    assert all(e.start <= e.end for e in found)
    assert found[3].start == found[3].end == 10, "a device runs one thing after the other"


def test_alone_runs_start_when_they_are_enqueued():
    found = events_alone(INFOS, times((1, 2, 5), (6, 7, 8), (9, 10, 15), (16, 17, 20), began=9.0))
    assert [(e.start, e.end) for e in found] == [(1, 5), (6, 8), (9, 15), (16, 20)]
    assert all(e.waits == Waits() for e in found)


def test_times_of_submeshes_add_up():
    step = MeasuredStep("step", INFOS, {}, ("stage=0", "stage=1"))
    call = make_call(step, times((1, 2, 10), (2, 3, 12), (3, 4, 20), (4, 5, 19)), False, {})
    assert call.duration == 20
    first, second = submesh_times(call)
    assert (first.busy, rounded(first.waits), first.done) == (18, (0, 0, 1), 1)
    assert (second.busy, rounded(second.waits), second.done) == (8, (10, 2, 0), 0)
    for s in (first, second):
        assert s.busy + s.waits.total + s.done + s.others == pytest.approx(20)


def test_overlapping_submeshes_wait_for_each_other():
    """A task on both devices runs after that of each."""
    whole = StepInfo("norm", "-", -1, -1, "all", (0, 1), ())
    infos = (run("a", 0, 0), run("b", 0, 1), whole, run("a", 1, 0))
    step = MeasuredStep("step", infos, {}, ("stage=0", "stage=1", "all"))
    call = make_call(step, times((0, 0, 4), (0, 0, 6), (0, 0, 9), (0, 0, 10)), False, {})
    assert [(e.start, e.end) for e in call.events] == [(0, 4), (0, 6), (6, 9), (9, 10)]
    first, _, every = submesh_times(call)
    assert (first.busy, first.others, first.done) == (5, 5, 0)
    assert (every.busy, every.waits.total, every.done) == (3, 0, 1)


def test_means_of_copies_prefer_those_alone():
    step = MeasuredStep("step", INFOS, {}, ("stage=0", "stage=1"))
    together = times((1, 2, 10), (2, 3, 12), (3, 4, 20), (4, 5, 19))
    alone = times((1, 2, 5), (6, 7, 9), (9, 10, 15), (16, 17, 20))
    edge = "stage=0 -> stage=1"
    assert copy_means(step, [(together, False)]) == {edge: 2.0}
    assert copy_means(step, [(together, False), (alone, True)]) == {edge: 3.0}
    assert copy_means(step, [(times((1, 2, 3), (2, 3), (3, 4, 5), (4, 5, 6)), False)]) == {}
