"""Every schedule on every stage graph, against slow and simple second opinions."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import (
    Action,
    Kind,
    Pair,
    TaskRun,
    actions_of,
    parse_rows,
    print_rows,
)
from multimesh._src.schedule.before import list_schedule
from multimesh._src.schedule.check import chain_of, check
from multimesh._src.schedule.graph import Part, fit
from multimesh._src.schedule.schedule import Schedule, parse_schedule
from multimesh._src.schedule.simulate import simulate
from tests.schedule.naive import (
    built_in_schedules,
    end_times,
    is_legal,
    stage_graphs,
)

some = settings(max_examples=100, deadline=None)


@some
@given(built_in_schedules())
def test_built_in_schedules_are_legal(schedule):
    check(schedule)
    assert is_legal(schedule.rows, chain_of(schedule), schedule.num_microbatches)


@some
@given(built_in_schedules())
def test_kinds_follow_each_other(schedule):
    for row in schedule.rows:
        at = {a: k for k, entry in enumerate(row) for a in actions_of(entry)}
        for action, k in at.items():
            before = {
                Kind.F: (),
                Kind.B: (Kind.F,),
                Kind.W: (Kind.F, Kind.B),
                Kind.BW: (Kind.F,),
            }[action.kind]
            assert all(at[replace(action, kind=kind)] < k for kind in before)


@some
@given(built_in_schedules())
def test_text_is_read_back(schedule):
    assert parse_rows(print_rows(schedule.rows)) == schedule.rows
    assert parse_schedule(schedule.as_text(), name=schedule.name) == schedule


@some
@given(st.data())
def test_built_in_schedules_fit_any_graph_in_stage_order(data):
    schedule = data.draw(built_in_schedules(max_ranks=3, max_microbatches=6))
    graph = data.draw(stage_graphs(placement=schedule.placement))
    fitted = fit(schedule, graph)
    ascending = all(edge.distance == 0 for edge in graph.edges)
    if not ascending:
        assume(is_legal(fitted.rows, graph, schedule.num_microbatches))
    check(fitted, graph)
    assert is_legal(fitted.rows, graph, schedule.num_microbatches)


@some
@given(graph=stage_graphs(), m=st.integers(1, 5))
def test_list_scheduling_does_any_graph(graph, m):
    schedule = list_schedule(graph, m)
    check(schedule, graph, m)
    assert is_legal(schedule.rows, graph, m)


@some
@given(graph=stage_graphs(), m=st.integers(1, 5), latency=st.integers(0, 3), data=st.data())
def test_the_order_is_complete_legal_and_exclusive(graph, m, latency, data):
    costs = {str(node): data.draw(st.integers(0, 3)) for node in graph.nodes}
    found = simulate(list_schedule(graph, m), graph, costs=costs, latency=latency)
    ran = {}
    for (row, what), start, end in zip(found.order, found.starts, found.ends, strict=True):
        node = what.name if isinstance(what, TaskRun) else str(Part(what.kind, what.stage))
        assert (node, what.microbatch) not in ran
        for edge in graph.edges:
            if str(edge.target) == node and what.microbatch >= edge.distance:
                # It ran before, also in the list, and its value is there.
                there = ran[str(edge.source), what.microbatch - edge.distance][1]
                assert start >= there + (latency if edge.crosses else 0)
        ran[node, what.microbatch] = (start, end, row)
    assert len(ran) == len(graph.nodes) * m
    assert list(found.starts) == sorted(found.starts)
    shared = {(row, row) for row in range(graph.num_rows)}
    shared |= {(t.row, r) for t in graph.outside for r in t.occupies}
    shared |= {(a, b) for a, r in shared for b, s in shared if r == s}
    runs = list(ran.values())
    for k, (start, end, row) in enumerate(runs):
        for other_start, other_end, other in runs[:k]:
            if (row, other) in shared or (other, row) in shared:
                assert end <= other_start or other_end <= start


@some
@given(schedule=built_in_schedules(), latency=st.integers(0, 4), data=st.data())
def test_times_are_longest_paths(schedule, latency, data):
    graph = chain_of(schedule)
    table = {str(node): data.draw(st.integers(1, 5)) for node in graph.nodes}

    def cost(entry):
        parts = [str(Part(a.kind, a.stage)) for a in actions_of(entry)]
        return sum(
            table[part] if part in table else table[part[:-1]] + table[part[:-2] + "W"]
            for part in parts
        )

    found = simulate(schedule, costs=table, latency=latency)
    expected = end_times(schedule.rows, graph, cost, latency)
    position = [0] * schedule.num_ranks
    for (row, what), end in zip(found.order, found.ends, strict=True):
        assert schedule.rows[row][position[row]] == what
        assert expected[row, position[row]] == end
        position[row] += 1
    assert found.makespan == max(expected.values())


@some
@given(schedule=built_in_schedules(), latency=st.integers(0, 4))
def test_the_critical_path_has_no_gap(schedule, latency):
    found = simulate(schedule, latency=latency)
    path = found.critical_path
    assert found.starts[path[0]] == 0
    assert found.ends[path[-1]] == found.makespan
    for first, second in itertools.pairwise(path):
        assert found.starts[second] - found.ends[first] in (0, latency)


def changed(draw, row, schedule):
    """One random change of a row, given as a list."""
    at = draw(st.integers(0, len(row) - 1))
    what = draw(st.sampled_from(("drop", "double", "swap", "move", "microbatch", "kind", "pair")))
    action = actions_of(row[at])[0]
    other = draw(st.integers(0, len(row) - 1))
    match what:
        case "drop":
            del row[at]
        case "double":
            row.insert(other, row[at])
        case "swap":
            row[at], row[other] = row[other], row[at]
        case "move":
            row.insert(other, row.pop(at))
        case "microbatch":
            row[at] = replace(action, microbatch=draw(st.integers(0, schedule.num_microbatches)))
        case "kind":
            row[at] = replace(action, kind=draw(st.sampled_from(Kind)))
        case "pair":
            following = row[at + 1] if at + 1 < len(row) else action
            if isinstance(row[at], Action) and isinstance(following, Action):
                row[at : at + 2] = [Pair(row[at], following)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_corruption_is_rejected_and_nothing_else(data):
    schedule = data.draw(built_in_schedules(max_ranks=3, max_microbatches=6))
    graph = chain_of(schedule)
    rows = [list(row) for row in schedule.rows]
    for _ in range(data.draw(st.integers(1, 2))):
        rank = data.draw(st.integers(0, len(rows) - 1))
        changed(data.draw, rows[rank], schedule)
        if rows[-1] and data.draw(st.integers(0, 5)) == 0:
            rows[rank].append(rows[-1].pop())
        assume(all(rows))
    m = schedule.num_microbatches
    corrupted = Schedule("custom", tuple(map(tuple, rows)), schedule.placement, m)
    if is_legal(corrupted.rows, graph, m):
        check(corrupted, graph)
        return
    with pytest.raises(ScheduleError):
        check(corrupted, graph)


@some
@given(st.data())
def test_corruptions_on_other_graphs(data):
    graph = data.draw(stage_graphs())
    m = data.draw(st.integers(1, 4))
    schedule = list_schedule(graph, m)
    rows = [list(row) for row in schedule.rows]
    rank = data.draw(st.integers(0, len(rows) - 1))
    assume(rows[rank])
    changed(data.draw, rows[rank], schedule)
    corrupted = replace(schedule, rows=tuple(map(tuple, rows)))
    if is_legal(corrupted.rows, graph, m):
        check(corrupted, graph)
        return
    with pytest.raises(ScheduleError):
        check(corrupted, graph)
