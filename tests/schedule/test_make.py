"""From what a user says to a schedule."""

import pytest

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.built_in import BUILT_IN, wavefront
from multimesh._src.schedule.check import check
from multimesh._src.schedule.graph import Part, StageGraph
from multimesh._src.schedule.make import make_schedule, schedule_names
from multimesh._src.schedule.placement import looped, v_shaped
from multimesh._src.schedule.rule import Request, Shape
from multimesh._src.schedule.zb_v import zb_v

F, B, W, BW = Kind


def refused(spec=None, **size):
    with pytest.raises(ScheduleError) as error:
        make_schedule(spec, **({"num_ranks": 3, "num_microbatches": 6} | size))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("fill-drain", "gpipe"),
        ("breadth-first", "gpipe"),
        ("zero-bubble-h2", "zb-h2"),
        ("wavefront", "eager-1f1b"),
        ("prefetch-wavefront", "eager-1f1b"),
    ],
)
def test_names_of_upstream(name, same):
    size = {"num_ranks": 3, "num_microbatches": 6}
    assert make_schedule(name, **size) == make_schedule(same, **size)
    assert make_schedule(name, **size).name == same


def test_wavefront_with_more_stages_a_rank():
    size = {"num_ranks": 3, "num_microbatches": 6, "num_chunks": 2}
    assert make_schedule("wavefront", **size).name == "interleaved-1f1b"
    assert make_schedule(wavefront, **size).name == "interleaved-1f1b"


def test_rules_and_schedules_as_objects():
    schedule = make_schedule(zb_v, num_ranks=2, num_microbatches=4)
    assert schedule == zb_v(num_ranks=2, num_microbatches=4)
    assert schedule.placement == v_shaped(2)
    assert schedule.kinds == {F, B, W}
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 4, 4)
    assert make_schedule(schedule, num_ranks=2, num_microbatches=4) == schedule
    assert str(schedule) == schedule.as_text()


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_kinds_are_those_of_the_rows(rule):
    assert rule(num_ranks=2, num_microbatches=6).kinds == set(rule.kinds)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ({}, "eager-1f1b"),
        ({"forward_only": True}, "gpipe"),
        ({"num_chunks": 2}, "interleaved-1f1b"),
        ({"num_chunks": 2, "num_microbatches": 11}, "looped-bfs"),
        ({"placement": "v"}, "zb-v"),
        ({"placement": (0, 1, 2, 2, 1, 0)}, "zb-v"),
        ({"placement": (0, 0, 1, 1, 2, 2)}, "list"),
        ({"placement": (0, 1, 2, 0)}, "interleaved-1f1b"),
    ],
)
def test_defaults(size, name):
    schedule = make_schedule(**({"num_ranks": 3, "num_microbatches": 6} | size))
    assert schedule.name == name
    check(schedule)


@pytest.mark.parametrize("name", [n for n in schedule_names() if n != "auto"])
def test_forward_only(name):
    schedule = make_schedule(name, num_ranks=2, num_microbatches=4, forward_only=True)
    assert schedule.kinds == {F}
    check(schedule)


def test_placements_may_end_early():
    schedule = make_schedule("looped-bfs", num_ranks=2, num_microbatches=2, placement=(0, 1, 0))
    assert schedule.placement == (0, 1, 0)
    assert schedule.as_text() == ("0F0 0F1 2F0 2F1 2BW1 2BW0 0BW1 0BW0\n1F0 1F1 1BW1 1BW0")
    check(schedule, StageGraph.chain(2, placement=(0, 1, 0), kinds=(F, BW)))


def test_pairs_lose_the_part_that_does_not_exist():
    schedule = make_schedule("dualpipe-v", num_ranks=2, num_microbatches=4, placement=(0, 1, 1))
    assert "3" not in schedule.rows[0][3:5]
    assert all(a.stage < 3 for row in schedule.rows for a in row if hasattr(a, "stage"))
    check(schedule)


def test_the_graph_decides_the_placement_and_the_kinds():
    nodes = (Part(F, 0), Part(F, 1), Part(BW, 1))
    graph = StageGraph((0, 1), nodes, (), 2)
    schedule = make_schedule("zb-h1", num_ranks=2, num_microbatches=2, graph=graph)
    assert schedule.as_text() == "0F0 0F1\n1F0 1BW0 1F1 1BW1"


def test_unknown_names_are_listed():
    text = refused("1f1c")
    assert "There is no schedule `1f1c`." in text
    for name in schedule_names():
        assert f"`{name}`" in text


def test_things_that_are_no_schedule():
    assert "`7` of type `int` is no schedule." in refused(7)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_one_chunk_schedules_name_those_for_more(name):
    text = refused(name, num_chunks=2)
    assert f"Schedule `{name}` has one stage a rank, but there are `2` stages a rank." in text
    assert "interleaved-1f1b" in text
    assert "looped-bfs" in text


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_v_schedules_have_two_stages_a_rank(name):
    assert "in the V placement, not `3`" in refused(name, num_chunks=3)
    text = refused(name, placement="loop", num_chunks=2)
    assert str(list(looped(3, 2))) in text
    assert str(list(v_shaped(3))) in text


@pytest.mark.parametrize(
    ("name", "size", "needs"),
    [
        ("zb-h1", {"num_microbatches": 2}, "`2` microbatches on `3` ranks: it needs `3` or more"),
        ("zb-h2", {"num_microbatches": 4}, "`4` microbatches on `3` ranks: it needs `5` or more"),
        ("dualpipe-v", {"num_microbatches": 5}, "it needs `6` or more (twice the ranks)"),
        (
            "interleaved-1f1b",
            {"num_microbatches": 11},
            "rounds of `3`, which does not divide `11`; the nearest numbers that it can do are "
            "`9` and `12`",
        ),
    ],
)
def test_numbers_of_microbatches(name, size, needs):
    assert needs in refused(name, **size)


def test_exactly_the_numbers_of_microbatches_that_a_schedule_can_do():
    can = {
        rule.name: [m for m in range(1, 12) if not rule.objection(Shape(3, m, chunks))]
        for rule in BUILT_IN
        for chunks in [2 if rule.chunks != "one" else 1]
    }
    everything = list(range(1, 12))
    assert can == {
        "gpipe": everything,
        "1f1b": everything,
        "eager-1f1b": everything,
        "interleaved-1f1b": [1, 2, 3, 4, 5, 6, 8, 9],
        "looped-bfs": everything,
        "zb-h1": list(range(3, 12)),
        "zb-h2": list(range(5, 12)),
        "zb-v": everything,
        "dualpipe-v": list(range(6, 12)),
    }


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ({"num_ranks": 0}, "A schedule of `0` ranks does not exist"),
        ({"num_microbatches": 0}, "A schedule of `0` microbatches does not exist"),
        ({"num_chunks": -1}, "A schedule of `-1` stages a rank does not exist"),
        ({"placement": "zigzag"}, "There is no placement `zigzag`."),
        ({"placement": "v", "num_chunks": 3}, "The V placement has `2` stages a rank, not `3`."),
    ],
)
def test_sizes_that_do_not_exist(size, problem):
    assert problem in refused("gpipe", **size)


def test_ready_schedules_of_another_size():
    schedule = make_schedule("gpipe", num_ranks=3, num_microbatches=6)
    assert "has `3` ranks, but the program has `2`." in refused(schedule, num_ranks=2)
    assert "has `6` microbatches, but the program has `5`" in refused(schedule, num_microbatches=5)


def test_a_stage_behind_the_layers_is_named_with_its_rank():
    request = Request(num_ranks=2, num_microbatches=4, placement=(0, 1, 1, 0, 1))
    with pytest.raises(ScheduleError) as caught:
        zb_v.make(request)
    assert "not `3`" in str(caught.value)
    assert str(caught.value).endswith("ranks are: rank 0: 0, 3; rank 1: 1, 2, 4.")
