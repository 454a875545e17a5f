"""What the checker says about schedules that do not run."""

import pytest

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Kind, parse_rows
from multimesh._src.schedule.before import before
from multimesh._src.schedule.check import check
from multimesh._src.schedule.graph import Edge, OutsideTask, Part, StageGraph, check_graph, fit
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.schedule import Schedule, parse_schedule

F, B, W, BW = Kind

CHAIN = StageGraph.chain(2, kinds=(F, BW))


def said(text, graph=CHAIN, num_microbatches=2, placement=None):
    schedule = Schedule("custom", parse_rows(text), placement or graph.placement, num_microbatches)
    with pytest.raises(ScheduleError) as error:
        check(schedule, graph)
    return str(error.value)


def test_a_legal_schedule_passes():
    assert check(parse_schedule("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"), CHAIN, 2) is None


def test_out_of_order_with_window_and_arrow():
    labels = StageGraph(CHAIN.placement, CHAIN.nodes, CHAIN.edges, 2, ("stage=0", "stage=1"))
    assert said("0F0 0F1 0BW0 0BW1\n1F0 1BW0 1BW1 1F1", labels) == (
        "`1BW1` runs before `1F1` on stage=1, but needs it.\n"
        "            stage=0  stage=1\n"
        "    step 0  0F0      1F0\n"
        "    step 1  0F1      1BW0\n"
        "    step 2  0BW0     `1BW1`  <-- here\n"
        "    step 3  0BW1     1F1\n"
        "To mend it: let every action stand after all that it needs, in the rows of all ranks."
    )


def test_out_of_order_over_another_rank():
    graph = StageGraph.chain(2, 2, "v", kinds=(F,))
    text = said("3F0 0F0\n1F0 2F0", graph, 1)
    assert "`3F0` runs before `0F0` on rank 0, but needs it." in text


def test_deadlock_shows_the_circle():
    text = said("0F0 0BW0 0F1 0BW1\n1F1 1BW1 1F0 1BW0")
    assert text.startswith(
        "The schedule deadlocks:\n"
        "  rank 0 waits in `0BW0` for `1BW0`, which stands later on rank 1\n"
        "  rank 1 waits in `1F1` for `0F1`, which stands later on rank 0\n"
    )
    assert "step 1  `0BW0`  1BW1  <-- here" in text


def test_deadlock_through_a_task_outside_the_ranks():
    tower = OutsideTask("tower", 2)
    nodes = (Part(F, 0), Part(F, 1), tower)
    edges = (Edge(Part(F, 0), tower, True), Edge(tower, Part(F, 1), True))
    graph = StageGraph((0, 1), nodes, (*edges, Edge(Part(F, 1), Part(F, 0), True, distance=1)), 2)
    assert check(parse_schedule("0F0 0F1\n1F0 1F1"), graph) is None
    text = said("0F0 0F1\n1F1 1F0", graph)
    assert "rank 0 waits in `0F1` for `1F0`, which stands later on rank 1" in text
    assert "rank 1 waits in `1F1` for `0F1`, which stands later on rank 0" in text


def numbered_backward():
    """A chain whose stage 1 comes first, with a task outside the ranks between the stages."""
    tower = OutsideTask("tower", 2)
    f0, f1, b0, b1 = Part(F, 0), Part(F, 1), Part(BW, 0), Part(BW, 1)
    needs = ((f1, tower), (tower, f0), (f0, b0), (f1, b1), (b0, b1))
    edges = tuple(Edge(a, b, True) for a, b in needs)
    return StageGraph((0, 1), (f0, f1, tower, b0, b1), edges, 2, ("stage=1", "stage=0"))


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", None])
def test_stages_that_are_numbered_against_the_dataflow(spec):
    graph = numbered_backward()
    schedule = make_schedule(spec, num_ranks=2, num_microbatches=2, graph=graph)
    with pytest.raises(ScheduleError) as error:
        check(schedule, graph)
    assert str(error.value) == (
        f"Schedule `{schedule.name}` wants stages that are numbered in the order of the forward "
        "pass, but\n"
        "  stage `1` (on stage=0) feeds stage `0` (on stage=1)\n"
        "  stage `0` (on stage=1) feeds stage `1` (on stage=0) in the backward pass\n"
        "To mend it, either:\n"
        "  1. number the stages in the order of the forward pass (`Task(stage=)`).\n"
        "  2. leave `Task.stage` out: the stages are then found in that order."
    )


def test_rows_by_hand_may_have_any_numbers():
    graph = numbered_backward()
    check(parse_schedule("0F0 0BW0\n1F0 1BW0"), graph)
    assert "runs before" in said("0BW0 0F0\n1F0 1BW0", graph, 1)


def test_a_made_schedule_that_cannot_run_does_not_speak_of_rows():
    chain = StageGraph.chain(2, kinds=(F, BW))
    carry = Edge(Part(BW, 0), Part(F, 0), distance=1)
    graph = StageGraph(chain.placement, chain.nodes, (*chain.edges, carry), 2)
    size = {"num_ranks": 2, "num_microbatches": 3, "graph": graph}
    with pytest.raises(ScheduleError, match="runs before") as error:
        check(make_schedule("1f1b", **size), graph)
    assert "in the rows" not in str(error.value)
    assert "schedules.before(lambda a, b: False)" in str(error.value)
    check(make_schedule(before(lambda a, b: False), **size), graph)


def test_ordered_carry():
    chain = StageGraph.chain(1, kinds=(F,))
    carry = Edge(Part(F, 0), Part(F, 0), distance=1)
    graph = StageGraph(chain.placement, chain.nodes, (carry,), 1)
    assert "`0F0` runs before `0F1`" not in said("0F1 0F0", graph)
    assert "`0F1` runs before `0F0` on rank 0, but needs it." in said("0F1 0F0", graph)


def test_a_pair_of_dependent_actions():
    text = said("[0F0|0BW0]", StageGraph.chain(1, kinds=(F, BW)), 1)
    assert "`0BW0` needs `0F0`, so the pair `[0F0|0BW0]` cannot overlap them." in text


def test_missing_actions_at_most_five():
    text = said("0F0\n1F0 1BW0", num_microbatches=3)
    assert text == (
        "`0F1` is missing in the row of rank 0.\n"
        "`0F2` is missing in the row of rank 0.\n"
        "`1F1` is missing in the row of rank 1.\n"
        "`1F2` is missing in the row of rank 1.\n"
        "`0BW0` is missing in the row of rank 0.\n"
        "... and 4 more\n"
        "To mend it: let the row of each rank run every action of its stages once for each of the "
        "`3` microbatches, and nothing else."
    )


def test_an_action_twice():
    text = said("0F0 0BW0 0F0\n1F0 1BW0", num_microbatches=1)
    assert text == (
        "`0F0` runs twice on rank 0.\n"
        "            rank 0  rank 1\n"
        "    step 0  0F0     1F0\n"
        "    step 1  0BW0    1BW0\n"
        "    step 2  `0F0`  <-- here\n"
        "To mend it: let the row of each rank run every action of its stages once for each of the "
        "`1` microbatches, and nothing else."
    )


def test_a_part_twice():
    text = said("0F0 0B0 0W0 0BW0", StageGraph.chain(1), 1)
    assert "`0B0` runs twice on rank 0 (the second time as part of `0BW0`)." in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0 7F0\n1F0", "`7F0` in the row of rank 0 is of stage `7`; there are `2`."),
        ("0F0 0F9\n1F0", "`0F9` in the row of rank 0 is of microbatch `9`; there are `2`."),
        ("0F0 0W0\n1F0", "`0W0` in the row of rank 0 does not exist: stage `0` has no `W`."),
        ("0F0 1F0\n1F1", "`1F0` in the row of rank 0 belongs to rank 1, which holds stage `1`."),
    ],
)
def test_actions_that_do_not_belong(text, problem):
    assert problem in said(text)


def test_wrong_number_of_rows():
    text = said("0F0 0BW0\n1F0 1BW0\n-", num_microbatches=1)
    assert "has `3` rows, but the program has `2` ranks." in text


def test_wrong_placement_prints_both():
    text = said("0F0 1F0\n2F0 3F0", StageGraph.chain(2, 2), 1, placement=(0, 0, 1, 1))
    assert "the schedule: stages 0, 1, ... on ranks `[0, 0, 1, 1]`" in text
    assert "the program:  stages 0, 1, ... on ranks `[0, 1, 0, 1]`" in text


def test_windows_of_many_ranks_are_cut():
    schedule = make_schedule("gpipe", num_ranks=20, num_microbatches=2)
    rows = list(schedule.rows)
    rows[15] = rows[15][::-1]
    with pytest.raises(ScheduleError) as error:
        check(Schedule("gpipe", tuple(rows), schedule.placement, 2))
    assert "rank 11  rank 12  rank 13  rank 14  rank 15  rank 16" in str(error.value)
    assert "rank 10" not in str(error.value)


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (StageGraph((0,), (Part(F, 0), Part(F, 0)), (), 1), "stands twice"),
        (StageGraph((0,), (Part(F, 3),), (), 1), "`3F` is of no stage: there are `1`."),
        (StageGraph((4,), (Part(F, 0),), (), 1), "A stage lies on rank `4` of `1`."),
        (StageGraph((0,), (Part(F, 0), OutsideTask("t", 0)), (), 1), "has row `0`"),
        (StageGraph((0,), (Part(F, 0),), (Edge(Part(F, 0), Part(B, 0)),), 1), "does not have"),
        (
            StageGraph((0,), (Part(F, 0),), (Edge(Part(F, 0), Part(F, 0), distance=-1),), 1),
            "has the distance `-1`",
        ),
        (
            StageGraph(
                (0,),
                (Part(F, 0), Part(B, 0)),
                (Edge(Part(F, 0), Part(B, 0)), Edge(Part(B, 0), Part(F, 0))),
                1,
            ),
            "has a cycle: `0F` -> `0B` -> `0F`.",
        ),
    ],
)
def test_graphs_that_make_no_sense(graph, problem):
    with pytest.raises(ScheduleError, match=r"stage|row|edge|node|rank") as error:
        check_graph(graph)
    assert problem in str(error.value)


def test_fit_drops_what_the_program_lacks():
    nodes = (Part(F, 0), Part(F, 1), Part(BW, 1), Part(F, 2), Part(B, 2), Part(W, 2))
    graph = StageGraph((0, 1, 2), nodes, (), 3)
    schedule = fit(make_schedule("zb-h1", num_ranks=3, num_microbatches=3), graph)
    assert schedule.as_text() == (
        "0F0 0F1 0F2\n1F0 1F1 1BW0 1F2 1BW1 1BW2\n2F0 2B0 2F1 2B1 2F2 2B2 2W0 2W1 2W2"
    )


def test_fit_takes_pairs_apart():
    schedule = make_schedule("dualpipe-v", num_ranks=2, num_microbatches=4)
    fitted = fit(schedule, StageGraph.chain(2, 2, "v", kinds=(F,)))
    assert fitted.as_text() == "0F0 0F1 0F2 3F0 3F1 0F3 3F2 3F3\n1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3"
    check(fitted)
