"""The order in which the host enqueues a microbatch loop: that of the simulated start times."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from multimesh._src.ir.program import TaskNode
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.order import scheduled_runs
from multimesh._src.partition.stages import Pipeline
from multimesh._src.schedule.actions import actions_of
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.simulate import Simulation, simulate

# name: stages a rank, placement, the fewest microbatches on p ranks, a divisor of their number
SCHEDULES = {
    "gpipe": (1, "loop", lambda p: 1, 1),
    "1f1b": (1, "loop", lambda p: 1, 1),
    "eager-1f1b": (1, "loop", lambda p: 1, 1),
    "interleaved-1f1b": (2, "loop", lambda p: p, 0),
    "looped-bfs": (3, "loop", lambda p: 1, 1),
    "zb-h1": (1, "loop", lambda p: p, 1),
    "zb-h2": (1, "loop", lambda p: 2 * p - 1, 1),
    "zb-v": (2, "v", lambda p: 1, 1),
    "dualpipe-v": (2, "v", lambda p: 2 * p, 1),
}


def pipeline_of(graph: StageGraph) -> Pipeline:
    """One empty task for each node."""
    body = jaxprs.new_closed_jaxpr([], [], [])
    tasks, node_of = [], {}
    for index, node in enumerate(graph.nodes):
        submesh = graph.placement[node.stage]
        task = TaskNode(index, str(node), str(node.kind), node.stage, submesh, body, (), (), "")
        tasks.append(task)
        node_of[index] = node
    return Pipeline(tuple(tasks), tuple(range(graph.num_ranks)), node_of, graph)


def starts_of(simulation: Simulation) -> dict[tuple[int, int], float]:
    """When each node starts in each microbatch."""
    found = {}
    for (_, event), start in zip(simulation.order, simulation.starts, strict=True):
        for action in actions_of(event):
            for node in simulation.graph.covers(action.kind, action.stage):
                found[node, action.microbatch] = start
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@given(p=st.integers(1, 5), more=st.integers(0, 12), whole=st.booleans())
@settings(max_examples=25, deadline=None)
def test_no_rank_is_enqueued_far_ahead_of_the_others(name, p, more, whole):
    """What is enqueued never starts later, by more than one forward, than what is not yet.

    The forward: the last stage's backward is enqueued with its forward when they are one program.
    """
    chunks, placement, fewest, divisor = SCHEDULES[name]
    m = fewest(p) + more
    m -= m % (divisor or p)
    kinds = ("F", "BW") if whole else ("F", "B", "W")
    graph = StageGraph.chain(p, chunks, placement, kinds)
    schedule = make_schedule(
        name, num_ranks=p, num_microbatches=m, num_chunks=chunks, placement=placement, graph=graph
    )
    simulation = simulate(schedule, graph)
    starts = starts_of(simulation)
    runs = scheduled_runs(pipeline_of(graph), simulation)
    times = [starts[run.task.index, run.iteration] for run in runs]
    assert len(times) == len(graph.nodes) * m
    earliest = float("inf")  # of what is enqueued later
    for time in reversed(times):
        assert time - earliest <= 1.0
        earliest = min(earliest, time)
