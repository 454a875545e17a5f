"""Tables, drawings and costs of calls on an ideal machine, where theory is what is measured."""

import io
import json
import sys

import pytest
from inline_snapshot import snapshot
from rich.console import Console

from multimesh._src.report.timeline.calls import MeasuredStep
from multimesh._src.report.timeline.steps import StepInfo
from multimesh._src.report.timeline.timeline import Timeline
from multimesh._src.runtime.timing import CallTimes, StepTimes
from multimesh.jax import schedules
from multimesh.jax.errors import DebugError
from tests.report.timeline.ideal import (
    NUM_MICROBATCHES,
    ideal_timeline,
    ideal_times,
    measured,
    partitioned_step,
)

MS = 1e-3


def costs_of(partitioned, uneven=1.0):
    """A millisecond for F, B and W each; stage 2 takes `uneven` times as long."""
    (simulation,) = partitioned.schedules.values()
    return {
        str(node): MS * len(node.kind) * (uneven if node.stage == 2 else 1.0)
        for node in simulation.graph.nodes
    }


@pytest.fixture(scope="module", params=["1f1b", "gpipe", "zb-h1", "zb-v"])
def partitioned(request):
    layers = {"num_stages": 2, "num_layers": 4} if request.param == "zb-v" else {}
    return partitioned_step(schedule=request.param, **layers)


def test_the_measured_makespan_is_the_simulated_one(partitioned):
    timeline = ideal_timeline(partitioned, costs_of(partitioned, 1.5), latency=0.2 * MS)
    (comparison,) = timeline.comparisons
    assert comparison.measured == pytest.approx(comparison.simulation.makespan)
    parts = dict(comparison.parts)
    assert sum(parts.values()) == pytest.approx(comparison.measured)
    assert parts["host, and runs that vary"] == pytest.approx(0, abs=1e-9)
    assert parts["uneven stages"] > 0 and parts["copies"] > 0
    assert comparison.measured_bubble == pytest.approx(comparison.simulation.bubble_share)


def test_costs_are_those_of_the_machine(partitioned):
    given = costs_of(partitioned, 1.5)
    timeline = ideal_timeline(partitioned, given, latency=0.2 * MS)
    found = timeline.costs().table
    (simulation,) = partitioned.schedules.values()
    last = str(len(simulation.graph.placement) - 1)
    for name, cost in given.items():
        if name[0] != last:
            assert found[name] == pytest.approx(cost), name
    # forward and backward of the last stage may be one program, divided by its operations
    whole = sum(cost for name, cost in given.items() if name[0] == last)
    assert sum(found[name] for name in given if name[0] == last) == pytest.approx(whole)
    assert timeline.latency() == pytest.approx(0.2 * MS)


def test_a_pipeline_of_equal_stages_has_only_its_bubble(partitioned):
    (simulation,) = partitioned.schedules.values()
    timeline = ideal_timeline(partitioned, costs_of(partitioned))
    (comparison,) = timeline.comparisons
    theory = schedules.simulate(simulation.schedule, simulation.graph, costs=costs_of(partitioned))
    assert comparison.measured == pytest.approx(theory.makespan)
    work = dict(comparison.parts)["work, spread evenly"]
    assert work == pytest.approx(sum(theory.busy) / len(theory.busy))
    for times, busy in zip(timeline.submeshes, theory.busy, strict=True):
        assert times.busy == pytest.approx(busy)
        assert times.waits.host == 0
        assert times.waits.task + times.done == pytest.approx(theory.makespan - busy)


def test_an_overlapped_pair_is_both_its_actions():
    partitioned = partitioned_step(num_stages=2, schedule="dualpipe-v", num_layers=4)
    (simulation,) = partitioned.schedules.values()
    pairs = {str(what) for _, what in simulation.order if isinstance(what, schedules.Pair)}
    timeline = ideal_timeline(partitioned, costs_of(partitioned))
    drawn = {event.action for event in timeline.events if event.action.startswith("[")}
    assert drawn and drawn <= pairs
    parts = {task.info.part for task in timeline.tasks if task.info.pair}
    assert "1F+2B+2W" in parts
    (comparison,) = timeline.comparisons
    assert dict(comparison.parts)["host, and runs that vary"] == pytest.approx(0, abs=1e-9)


def test_a_slow_host_is_seen():
    partitioned = partitioned_step()
    timeline = ideal_timeline(partitioned, costs_of(partitioned), enqueue=0.5 * MS)
    assert all(times.waits.host > 0 for times in timeline.submeshes)
    assert dict(timeline.comparisons[0].parts)["host, and runs that vary"] > 5 * MS
    assert any("Give each run more to do" in line for line in timeline.table().advice)


def test_measured_costs_choose_another_schedule():
    """With slow copies `auto` takes what runs ahead, with fast ones what splits the backward."""
    partitioned = partitioned_step()
    fast = ideal_timeline(partitioned, costs_of(partitioned))
    slow = ideal_timeline(partitioned, costs_of(partitioned), latency=2 * MS)
    size = {"num_ranks": 4, "num_microbatches": NUM_MICROBATCHES}
    chosen = [
        schedules.make_schedule(schedules.auto(costs=t.costs(), latency=t.latency()), **size)
        for t in (fast, slow)
    ]
    simulated = [
        schedules.simulate(schedule, costs=slow.costs(), latency=slow.latency()).makespan
        for schedule in chosen
    ]
    assert chosen[0].name.startswith("zb-") and simulated[1] <= simulated[0]
    again = partitioned_step(schedule=schedules.auto(costs=fast.costs()))
    assert [s.schedule.name for s in again.schedules.values()] == [chosen[0].name]


def test_copies_that_are_not_seen_are_estimated():
    partitioned = partitioned_step()
    costs = costs_of(partitioned)
    step = measured(partitioned)

    def seconds(info):
        return sum(costs[name] for name, _ in info.nodes)

    seen = ideal_times(step.infos, seconds, 0.5 * MS)
    unseen = ideal_times(step.infos, seconds, 0.5 * MS, unseen=lambda info: True)
    exact, estimated = Timeline([(step, seen, False), (step, unseen, False)]).calls
    assert all(event.duration == pytest.approx(0.5 * MS) for event in estimated.copies)
    for one, other in zip(exact.runs, estimated.runs, strict=True):
        assert other.start == pytest.approx(one.start)
        assert other.waits.copy == pytest.approx(one.waits.copy)
    (alone,) = Timeline([(step, unseen, False)]).calls
    assert all(event.duration == 0 for event in alone.copies), "nothing is known of them"


@pytest.fixture(scope="module")
def ideal():
    partitioned = partitioned_step(num_stages=2, schedule="1f1b")
    return ideal_timeline(partitioned, costs_of(partitioned), latency=0.25 * MS)


def test_table_of_submeshes(ideal):
    assert str(ideal).startswith("step: one call of 22.5 ms.\n\nSubmeshes (shares of the call)\n")
    assert ideal.table().tables[0].as_text() == snapshot("""\
Submeshes (shares of the call)
  submesh    busy    task   copy   host    done
  -------  ------  ------  -----  -----  ------
  stage=0  80.0 %  15.6 %  4.4 %  0.0 %   0.0 %
  stage=1  80.0 %   6.7 %  3.3 %  0.0 %  10.0 %
  task, copy, host: waited for a task on another submesh, for a copy on its way, for the host to
  enqueue; done: had nothing left to do.\
""")


def test_table_of_tasks(ideal):
    assert ideal.table().tables[1].as_text() == snapshot("""\
Tasks
  task                   action  submesh  runs    a run  longest  alone   share
  ---------------------  ------  -------  ----  -------  -------  -----  ------
  main                   -       stage=0     1        0        0      -   0.0 %
  main#2                 -       stage=1     1        0        0      -   0.0 %
  layer0_fwd             0F      stage=0     6  1.00 ms  1.00 ms      -  16.7 %
  copy of literal        -       stage=1     1        0        0      -   0.0 %
  layer1_fwd+layer1_bwd  1F+BW   stage=1     6  3.00 ms  3.00 ms      -  50.0 %
  layer0_bwd             0BW     stage=0     6  2.00 ms  2.00 ms      -  33.3 %
  main#3                 -       stage=0     1        0        0      -   0.0 %
  main#4                 -       stage=1     1        0        0      -   0.0 %
  a run: the mean; alone: when nothing else runs; share: of all runs of a call.\
""")


def test_table_of_copies(ideal):
    assert ideal.table().tables[2].as_text() == snapshot("""\
Copies
  from -> to             copies  a copy  alone
  ---------------------  ------  ------  -----
  stage=0 -> stage=1          6  250 us      -
  stage=1 -> stage=0          6  250 us      -
  stage=1 -> everywhere       1  250 us      -\
""")


def test_table_of_a_loop_and_what_to_change(ideal):
    _, loop = str(ideal).split("\n\nLoop of ")
    assert loop == snapshot("""\
`1f1b`, 6 microbatches
  what its time is made of     time    share
  ------------------------  -------  -------
  work, spread evenly       18.0 ms   80.0 %
  bubble of `1f1b`          3.00 ms   13.3 %
  uneven stages                   0    0.0 %
  copies                    1.50 ms    6.7 %
  host, and runs that vary        0    0.0 %
  the loop, measured        22.5 ms  100.0 %
  Simulated with these times and copies the loop takes 22.5 ms and its ranks are idle 20%; measured
  22.5 ms and 20%.

What to change
  - 3.00 ms, 13% of the loop, are the schedule's bubble: more microbatches make it smaller, or, if
    its memory fits, `schedule='zb-h2'`: 19.2 ms by simulation in place of 22.5 ms.
  - 1.50 ms, 7% of the loop, go to copies, 250 us from `0F` to `1F`: `explain()` lists what
    crosses; `schedule='eager-1f1b'` runs ahead of slow links.\
""")


def test_the_drawing_and_its_width(ideal):
    assert ideal.grid(width=80, color=False) == snapshot("""\
step: 22.5 ms, 158 us a column; waits: . for a task, ~ for a copy, h for the
host
stage=0  0F0--|0F1---|..............~0BW0--------|0F2--|0BW1--------|0F3--|..~0B
stage=1  ......~~1F+BW0------------|1F+BW1------------|.~~1F+BW2------------|1F+

stage=0  W2--------|0F4--|0BW3--------|0F5--|..~0BW4--------|.....~0BW5--------|
stage=1  BW3------------|.~~1F+BW4------------|1F+BW5------------|\
""")
    narrow = ideal.grid(width=50, color=False).splitlines()
    assert max(map(len, narrow)) <= 50
    assert "\033[30;44m" in ideal.grid(width=80, color=True)


def test_tasks_of_one_action_are_drawn_as_one():
    runs = (("embed", 0, 4.0), ("layer0_fwd", 0, 10.0), ("embed", 1, 20.0))
    infos = tuple(StepInfo(name, "F", 0, i, "stage=0", (0,), ()) for name, i, _ in runs)
    times = tuple(StepTimes(i, 0.0, 0.0, end) for i, (*_, end) in enumerate(runs))
    step = MeasuredStep("step", infos, {}, ("stage=0",))
    timeline = Timeline([(step, CallTimes(0.0, 20.0, times), False)])
    *_, line = timeline.grid(width=49, color=False).splitlines()
    assert line == f"stage=0  0F0{'-' * 16}|0F1{'-' * 16}|"


def test_rich_tables_fit_a_terminal():
    partitioned = partitioned_step(num_stages=2)
    timeline = ideal_timeline(partitioned, costs_of(partitioned))
    stream = io.StringIO()
    Console(file=stream, width=80).print(timeline)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("layer1_fwd+layer1_bwd" in line and "1F+BW" in line for line in lines)


def test_trace_file(tmp_path):
    partitioned = partitioned_step(num_stages=2)
    timeline = ideal_timeline(partitioned, costs_of(partitioned), latency=0.25 * MS)
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert sorted(threads.values()) == sorted(
        ["enqueues", "stage=0", "stage=1", "stage=0 -> stage=1", "stage=1 -> stage=0"]
        + [name for name in threads.values() if "everywhere" in name]
    )
    slices = [e for e in events if e["ph"] == "X"]
    (forward,) = (e for e in slices if e["name"] == "layer0_fwd[1]" and e["pid"] == 1)
    assert threads[1, forward["tid"]] == "stage=0"
    assert (forward["ts"], forward["dur"]) == (1000.0, 1000.0)
    assert forward["args"]["microbatch"] == 1
    on_host = [e for e in slices if e["pid"] == 3]
    assert len(on_host) == 1 + len(timeline.events)


# --- several steps, and errors --------------------------------------------------------------------


def test_several_steps_are_told_apart():
    first, second = partitioned_step(num_stages=2), partitioned_step(num_stages=4)
    one = ideal_timeline(first, costs_of(first))
    other = ideal_timeline(second, costs_of(second))
    renamed = [(step, times, alone) for step, times, alone in other._recorded]
    timeline = Timeline([*one._recorded, *renamed])
    assert len(timeline.submeshes) == 4, "the step that was called last"
    assert len(timeline.calls) == 2 and timeline.names == ("step",)
    assert timeline.only("step").call.step is timeline.call.step
    with pytest.raises(DebugError, match="No call of `train` was recorded; recorded are: `step`"):
        timeline.only("train")


@pytest.mark.parametrize(
    "look",
    [str, Timeline.grid, lambda t: t.events, lambda t: t.save("x"), lambda t: t.plot("x"),
     Timeline.costs],
)  # fmt: skip
def test_nothing_was_recorded(look):
    with pytest.raises(DebugError, match="Nothing was recorded: no step of MultiMesh ran"):
        look(Timeline())


def test_costs_of_what_was_not_measured():
    partitioned = partitioned_step(num_stages=2)
    timeline = ideal_timeline(partitioned, costs_of(partitioned))
    with pytest.raises(DebugError, match="No call of `step` was measured alone"):
        timeline.costs(alone=True)
    step = measured(partitioned)
    bare = type(step)("eval", step.infos, {}, step.submeshes)
    with pytest.raises(DebugError, match="`eval` has no microbatch loop that runs once"):
        Timeline([(bare, timeline._recorded[0][1], False)]).costs()


def test_plot_without_matplotlib(monkeypatch, tmp_path):
    partitioned = partitioned_step(num_stages=2)
    timeline = ideal_timeline(partitioned, costs_of(partitioned))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DebugError, match=r"pip install 'multimesh-jax\[viz\]'"):
        timeline.plot(tmp_path / "step.png")


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    partitioned = partitioned_step(num_stages=2)
    timeline = ideal_timeline(partitioned, costs_of(partitioned), latency=0.25 * MS)
    timeline.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
