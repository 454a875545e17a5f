"""From what a user says to a schedule."""

import textwrap

import pytest
from inline_snapshot import snapshot

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.built_in import BUILT_IN, wavefront
from multimesh._src.schedule.check import check
from multimesh._src.schedule.graph import Part, StageGraph
from multimesh._src.schedule.make import make_schedule, schedule_names
from multimesh._src.schedule.placement import looped, v_shaped
from multimesh._src.schedule.rule import Shape
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


def refused_on(spec, placement, names=None):
    num_ranks = len(set(placement))
    with pytest.raises(ScheduleError) as caught:
        make_schedule(
            spec, num_ranks=num_ranks, num_microbatches=4, placement=placement, names=names
        )
    return "\n".join(textwrap.fill(line, 95) for line in str(caught.value).splitlines())


def test_a_stage_behind_the_layers_is_named_with_its_rank_and_where_it_belongs():
    names = {
        **{f"layer{i}:{kind}": Part(kind, i) for i in range(4) for kind in (F, BW)},
        "out:F": Part(F, 4),
        "loss": Part(F, 4),
        "apart": None,
    }
    assert refused_on("zb-v", (0, 1, 1, 0, 1), names) == snapshot("""\
Schedule `zb-v` wants its stages on other ranks than the program has them.
    the schedule: stages 0, 1, ... on ranks `[0, 1, 1, 0]`
    the program:  stages 0, 1, ... on ranks `[0, 1, 1, 0, 1]`
    stage 4 (`out`, `loss`) lies on rank 1 beside stage 1 (`layer1`) and stage 2 (`layer2`);
the schedule ends with stage 3
To mend it, either:
  1. name no schedule: the default is then list scheduling, which takes any placement.
  2. put the tasks of stage 4 on rank 0, so that they join stage 3 (`layer3`).\
""")


def test_tasks_that_go_back_to_earlier_ranks_are_named():
    names = {name: Part(F, i) for i, name in enumerate(("down0", "down1", "mid", "up1", "up0"))}
    assert refused_on("1f1b", (0, 1, 2, 1, 0), names) == snapshot("""\
Schedule `1f1b` wants its stages on other ranks than the program has them.
    the schedule: stages 0, 1, ... on ranks `[0, 1, 2]`
    the program:  stages 0, 1, ... on ranks `[0, 1, 2, 1, 0]`
    stage 3 (`up1`) lies on rank 1 beside stage 1 (`down1`); the schedule ends with stage 2
    stage 4 (`up0`) lies on rank 0 beside stage 0 (`down0`); the schedule ends with stage 2
To mend it, either:
  1. name no schedule: the default is then list scheduling, which takes any placement.
  2. put the stages on the ranks that the schedule wants (`register_layers` does so for layers
with `interleave=1`).\
""")


def test_a_stage_of_many_tasks_names_a_few():
    names = {f"block{i}": (Part(F, 1), Part(BW, 1)) for i in range(5)}
    text = refused_on("zb-v", (0, 1, 0, 1), names)
    assert "stage 2 lies on rank 0; the schedule wants it on rank 1" in text
    text = refused_on("looped-bfs", (0, 1, 1, 0), {"a": Part(F, 2), **names})
    assert "stage 2 (`a`) lies on rank 1; the schedule wants it on rank 0" in text
    text = refused_on("1f1b", (0, 1, 1), names)
    assert "beside stage 1 (`block0`, `block1`, `block2` and 2 more)" in text


PLACEMENTS = ((0, 1, 2, 1, 0), (0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 1, 0, 1), (0, 1, 1, 0), (0, 1, 0))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.name)
def test_what_an_error_recommends_fits_the_placement(rule, placement):
    size = {"num_ranks": len(set(placement)), "num_microbatches": 12, "placement": placement}
    try:
        make_schedule(rule, **size)
    except ScheduleError as error:
        first = next(line for line in str(error).splitlines() if line.startswith("  1. "))
        recommended = [name for name in schedule_names() if f'"{name}"' in first]
        assert recommended or "name no schedule" in first
        for spec in recommended or [None]:
            make_schedule(spec, **size)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("spec", [None, "auto"])
def test_the_default_and_auto_take_any_placement(spec, placement):
    size = {"num_ranks": len(set(placement)), "num_microbatches": 3, "placement": placement}
    check(make_schedule(spec, **size))


def test_labels_of_the_ranks_are_those_of_the_graph():
    chain = StageGraph.chain(2, placement=(0, 1, 1, 0, 1))
    graph = StageGraph(chain.placement, chain.nodes, chain.edges, 2, ("stage=0", "stage=1"))
    with pytest.raises(ScheduleError, match="put the tasks of stage 4 on stage=0"):
        make_schedule("zb-v", num_ranks=2, num_microbatches=4, graph=graph)
