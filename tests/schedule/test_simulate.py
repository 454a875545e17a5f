"""Numbers of the simulator that can be worked out by hand."""

import pytest

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Kind, TaskRun, parse_rows
from multimesh._src.schedule.costs import Costs, Memory
from multimesh._src.schedule.graph import Edge, OutsideTask, Part, StageGraph
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.schedule import Schedule, parse_schedule
from multimesh._src.schedule.simulate import simulate

F, B, W, BW = Kind


def drawn(simulation):
    rows = [[] for _ in range(simulation.graph.num_rows)]
    for (row, what), start in zip(simulation.order, simulation.starts, strict=True):
        rows[row].append(f"{what}@{start:g}")
    return [" ".join(row) for row in rows]


def with_tower(num_ranks, task, *, after=None, before=None, kinds=(F, BW)):
    chain = StageGraph.chain(num_ranks, kinds=kinds)
    edges = [Edge(after, task, True)] if after else []
    edges += [Edge(task, before, True)] if before else []
    return StageGraph(chain.placement, (*chain.nodes, task), (*chain.edges, *edges), num_ranks)


def test_order_and_bubbles():
    found = simulate(parse_schedule("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"))
    assert drawn(found) == ["0F0@0 0F1@1 0BW0@4 0BW1@7", "1F0@1 1BW0@2 1F1@4 1BW1@5"]
    assert [(row, str(what)) for row, what in found.order[:4]] == [
        (0, "0F0"),
        (0, "0F1"),
        (1, "1F0"),
        (1, "1BW0"),
    ]
    assert found.makespan == 9
    assert found.busy == (6, 6)
    assert found.spans == ((0, 9), (1, 7))
    assert found.span_bubbles == (3, 0)
    assert found.makespan_bubbles == (3, 3)
    assert (found.span_bubble, found.makespan_bubble) == (3, 3)
    assert found.bubble_share == pytest.approx(1 / 3)
    assert [str(found.order[k][1]) for k in found.critical_path] == [
        "0F0",
        "1F0",
        "1BW0",
        "1F1",
        "1BW1",
        "0BW1",
    ]
    assert repr(found) == "Simulation(custom, makespan=9, bubble_share=0.333)"


def test_costs_of_nodes_kinds_and_pairs():
    schedule = parse_schedule("0F0 0F1 [1F0|0BW0] 1BW0 1F1 0BW1 1BW1")
    graph = StageGraph.chain(1, 2, kinds=(F, BW))
    for node in (Part(F, 1), Part(BW, 0)):
        assert node in graph.nodes
    free = StageGraph(graph.placement, graph.nodes, (), 1)
    table = {"F": 1, "1F": 10, "BW": 100, "[1F|0BW]": 50}
    assert simulate(schedule, free, costs=table).makespan == 2 + 50 + 100 + 10 + 200
    del table["[1F|0BW]"]
    assert simulate(schedule, free, costs=table).makespan == 2 + 110 + 100 + 10 + 200
    assert Costs({"B": 2, "W": 3}).of(Part(BW, 0)) == 5
    assert Costs({"B": 2, "0W": 4}).of(Part(BW, 0)) == 6


def test_a_split_stage_may_have_a_cost_for_both_together():
    schedule = parse_schedule("0F0 0BW0 0F1 0B1 0W1")
    assert simulate(schedule).makespan == 6
    assert simulate(schedule, costs={"BW": 1.5}).makespan == 5.5


def test_negative_costs():
    with pytest.raises(ScheduleError, match="The cost of `F` is `-1`"):
        simulate(parse_schedule("0F0"), costs={"F": -1})


def test_costs_of_nothing():
    with pytest.raises(ScheduleError, match="The cost of `fwd` is of no kind, node, task or pair"):
        simulate(parse_schedule("0F0"), costs={"fwd": 1})


def test_negative_latency():
    with pytest.raises(ScheduleError, match="The latency is `-1`"):
        simulate(parse_schedule("0F0"), latency=-1)
    with pytest.raises(ScheduleError, match="The latency from `0F` to `1F` is `-1`"):
        simulate(parse_schedule("0F0"), latency={("0F", "1F"): -1})


def test_latency_of_single_edges():
    schedule = parse_schedule("0F0 0BW0\n1F0 1BW0")
    assert simulate(schedule).makespan == 6
    assert simulate(schedule, latency=0.5).makespan == 7
    assert simulate(schedule, latency={("0F", "1F"): 3}).makespan == 9


def test_free_actions_stay_in_dataflow_order():
    schedule = make_schedule("zb-v", num_ranks=3, num_microbatches=6)
    found = simulate(schedule, costs=dict.fromkeys("FBW", 0))
    seen = [str(what) for _, what in found.order]
    assert seen.index("0F3") < seen.index("5F3") < seen.index("5B3") < seen.index("0B3")
    assert found.makespan == 0
    assert found.bubble_share == 0


def test_a_tower_on_its_own_devices():
    tower = OutsideTask("tower", 2)
    found = simulate(
        make_schedule("gpipe", num_ranks=2, num_microbatches=2, forward_only=True),
        with_tower(2, tower, before=Part(F, 1), kinds=(F,)),
        costs={"tower": 3},
        latency=1,
    )
    assert drawn(found) == ["0F0@0 0F1@1", "1F0@4 1F1@7", "tower:0@0 tower:1@3"]
    assert found.order[1] == (2, TaskRun("tower", 0))
    assert len(found.span_bubbles) == 2


def test_a_tower_on_a_rank_takes_turns_with_it():
    tower = OutsideTask("tower", 2, occupies=(0,))
    found = simulate(
        make_schedule("gpipe", num_ranks=2, num_microbatches=3, forward_only=True),
        with_tower(2, tower, before=Part(F, 1), kinds=(F,)),
    )
    assert drawn(found) == [
        "0F0@0 0F1@2 0F2@4",
        "1F0@2 1F1@4 1F2@6",
        "tower:0@1 tower:1@3 tower:2@5",
    ]


def test_a_task_on_all_ranks_is_not_starved():
    loss = OutsideTask("loss", 3, occupies=(0, 1, 2))
    graph = with_tower(3, loss, after=Part(F, 2), before=Part(BW, 2))
    found = simulate(make_schedule("1f1b", num_ranks=3, num_microbatches=6), graph)
    runs = drawn(found)[3].split()
    starts = [float(run.split("@")[1]) for run in runs]
    ends = {str(what): end for (_, what), end in zip(found.order, found.ends, strict=True)}
    assert [run.split("@")[0] for run in runs] == [f"loss:{i}" for i in range(6)]
    assert all(start - ends[f"2F{i}"] <= 2 for i, start in enumerate(starts))


def test_outside_tasks_of_overlapping_submeshes_exclude_each_other():
    tasks = (OutsideTask("a", 1, (0,)), OutsideTask("b", 2, (0,)))
    chain = StageGraph.chain(1, kinds=(F,))
    graph = StageGraph(chain.placement, (*chain.nodes, *tasks), (), 1)
    found = simulate(parse_schedule("0F0"), graph)
    assert drawn(found) == ["0F0@0", "a:0@1", "b:0@2"]


def test_ranks_that_share_devices_exclude_each_other():
    chain = StageGraph.chain(2, kinds=(F,))
    graph = StageGraph(chain.placement, chain.nodes, (), 2, overlaps=((0, 1),))
    found = simulate(parse_schedule("0F0 0F1\n1F0 1F1"), graph)
    assert drawn(found) == ["0F0@0 0F1@1", "1F0@2 1F1@3"]


def test_peaks_count_sets_and_bytes():
    schedule = parse_schedule("0F0 0F1 0B0 0B1 0F2 0B2 0W0 0W1 0W2")
    memory = Memory(residual=100, waiting=10, fixed=1)
    peaks = simulate(schedule, memory=memory).peaks
    assert (peaks.until_b, peaks.until_w, peaks.waiting) == ((2,), (3,), (3,))
    assert peaks.num_bytes == (201,)
    other = simulate(schedule, memory=Memory(stages={0: (10, 100)})).peaks
    assert other.num_bytes == (300,)


def test_peaks_of_stages_that_lack_kinds():
    nodes = (Part(F, 0), Part(F, 1), Part(W, 1), Part(F, 2), Part(BW, 2))
    graph = StageGraph((0, 0, 0), nodes, (), 1)
    schedule = parse_schedule("0F0 1F0 2F0 0F1 1F1 2F1 2BW0 2BW1 1W0 1W1")
    peaks = simulate(schedule, graph, memory=Memory(residual=1)).peaks
    assert (peaks.until_b, peaks.until_w, peaks.num_bytes) == ((4,), (4,), (4,))


def test_a_pair_opens_before_it_closes():
    graph = StageGraph.chain(1, 2, kinds=(F, BW))
    free = StageGraph(graph.placement, graph.nodes, (), 1)
    for pair in ("[0F1|0BW0]", "[0BW0|0F1]"):
        schedule = parse_schedule(f"0F0 1F0 {pair} 1F1 1BW0 0BW1 1BW1")
        assert simulate(schedule, free).peaks.until_b == (3,)


def test_a_schedule_that_cannot_run():
    with pytest.raises(ScheduleError, match="runs before"):
        simulate(parse_schedule("0BW0 0F0"))
    with pytest.raises(ScheduleError, match="is missing"):
        simulate(parse_schedule("0F0 0F1 0BW0"))
    with pytest.raises(ScheduleError, match="on other ranks"):
        simulate(parse_schedule("0F0 1F0"), StageGraph.chain(1))
    with pytest.raises(ScheduleError, match="is of stage `3`; there are `1`"):
        simulate(Schedule("custom", parse_rows("0F0 3F0"), (0,), 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_large(name):
    chunks = 4 if name == "interleaved-1f1b" else 2
    schedule = make_schedule(name, num_ranks=64, num_microbatches=1024, num_chunks=chunks)
    found = simulate(schedule)
    expected = {"interleaved-1f1b": 12477, "zb-v": 6207, "dualpipe-v": 6270}
    assert found.makespan == expected[name]
    assert len(found.order) == sum(map(len, schedule.rows))
