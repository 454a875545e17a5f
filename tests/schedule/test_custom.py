"""Schedules given by hand: text, files, task names, and what must run before what."""

import pytest

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Action, Kind, Pair
from multimesh._src.schedule.before import before, list_schedule
from multimesh._src.schedule.check import check
from multimesh._src.schedule.custom import custom, from_file
from multimesh._src.schedule.graph import Part, StageGraph
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.schedule import parse_schedule

F, B, W, BW = Kind

TEXT = "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"
NAMES = {
    "embed": Part(F, 0),
    "layers_0": Part(F, 0),
    "layers_0.bwd": Part(BW, 0),
    "layers_1": Part(F, 1),
    "layers_1.bwd": Part(BW, 1),
    "norm": None,
}


def made(spec, **options):
    return make_schedule(spec, **({"num_ranks": 2, "num_microbatches": 2} | options))


def refused(spec, **options):
    with pytest.raises(ScheduleError) as error:
        made(spec, **options)
    return str(error.value)


@pytest.mark.parametrize(
    "rows",
    [
        TEXT,
        TEXT.splitlines(),
        [line.split() for line in TEXT.splitlines()],
        [["0F0", Action(F, 0, 1), "0BW0", "0BW1"], "1F0 1BW0 1F1 1BW1"],
        custom(TEXT),
    ],
)
def test_rows_of_actions(rows):
    schedule = made(rows)
    assert schedule == parse_schedule(TEXT)
    assert schedule.name == "custom"
    check(schedule)


def test_one_row_of_text():
    assert make_schedule("0F0 0BW0", num_ranks=1, num_microbatches=1).as_text() == "0F0 0BW0"


def test_pairs_in_rows():
    pair = Pair(Action(F, 0, 1), Action(BW, 0, 0))
    rows = [["0F0", pair, "[0F2|0BW1]", "0BW2"]]
    schedule = make_schedule(rows, num_ranks=1, num_microbatches=3)
    assert schedule.as_text() == "0F0 [0F1|0BW0] [0F2|0BW1] 0BW2"


def test_task_names_are_numbered_by_occurrence():
    rows = [
        ["embed", "layers_0", "embed", "layers_0", "layers_0.bwd", "norm", "layers_0.bwd", "norm"],
        ["layers_1", "layers_1.bwd", "layers_1", "layers_1.bwd"],
    ]
    assert made(rows, names=NAMES).as_text() == TEXT


def test_task_names_with_microbatches():
    rows = [
        [(0, "layers_0"), [1, "layers_0"], (0, "layers_0.bwd"), "0BW1"],
        [(0, "layers_1"), (0, "layers_1.bwd"), (1, "layers_1"), (1, "layers_1.bwd")],
    ]
    # The second backward of stage 0 stands there as an action, its task only once.
    assert "Task `layers_0.bwd` runs `1` times in row `0`" in refused(rows, names=NAMES)
    rows[0][3] = (1, "layers_0.bwd")
    assert made(rows, names=NAMES).as_text() == TEXT


def test_one_task_that_is_forward_and_backward():
    names = {"stage_0": Part(F, 0), "back_0": Part(BW, 0), "last": (Part(F, 1), Part(BW, 1))}
    rows = [["stage_0", "stage_0", "back_0", "back_0"], ["last", "last"]]
    assert made(rows, names=names).as_text() == TEXT


def test_names_match_exactly():
    rows = [["layers_0", "layers_0", "layers"], ["layers_1", "layers_1", (0, "layers_1b")]]
    text = refused(rows, names=NAMES)
    assert "`layers` in row `0` is no task and no action." in text
    assert "`layers_1b` of microbatch `0` in row `1` is no task." in text
    assert "use the names of tasks (`embed`, `layers_0`, `layers_0.bwd`," in text


def test_names_run_once_a_microbatch():
    rows = [["layers_0"], [(0, "layers_1"), (0, "layers_1")]]
    text = refused(rows, names=NAMES)
    assert (
        "Task `layers_0` runs `1` times in row `0`; "
        "it runs once for each of the `2` microbatches." in text
    )
    assert "Task `layers_1` runs microbatches `[0, 0]` in row `1`;" in text


def test_wrong_number_of_rows():
    text = refused(TEXT + "\n2F0 2BW0")
    assert "The custom schedule has `3` rows, but the program has `2` ranks." in text


def test_items_that_name_nothing():
    assert "Row `1` holds `3.5`, which names no action." in refused([["0F0"], [3.5]])


def test_rows_without_a_stage():
    assert "Stage `1` stands in no row." in refused("0F0 0F1\n2F0 2F1")
    assert "Stage `0` stands in the rows of ranks `[0, 1]`" in refused("0F0\n0F1")
    assert "The schedule has no actions." in refused("-\n-")


def test_empty_rows_are_kept():
    chain = StageGraph.chain(2, kinds=(F,))
    schedule = made([["0F0", "0F1"], []], placement=(0, 1))
    with pytest.raises(ScheduleError, match="`1F0` is missing"):
        check(schedule, chain)
    assert schedule.as_text() == "0F0 0F1\n-"


def test_files(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("# two ranks\n" + TEXT + "\n")
    assert made(from_file(path)).as_text() == TEXT
    path.write_text(TEXT.replace("1BW0", "1BX0"))
    with pytest.raises(ScheduleError) as error:
        from_file(path)
    assert str(error.value).startswith(
        f"`1BX0` in line 2 is not an action:\n    1F0 1BX0 1F1 1BW1\n        ^^^^\n  at {path}\n"
    )
    path.write_text(TEXT + "\n2F0")
    assert str(path) in refused(from_file(path))
    with pytest.raises(ScheduleError, match=r"none.txt` cannot be read: "):
        from_file(tmp_path / "none.txt")


def test_before_gives_gpipe():
    rule = before(lambda a, b: a.kind == "F" and b.kind == "BW")
    schedule = make_schedule(rule, num_ranks=2, num_microbatches=3)
    gpipe = make_schedule("gpipe", num_ranks=2, num_microbatches=3)
    assert schedule.rows == gpipe.rows
    assert schedule.name == "custom"


def test_before_gives_1f1b():
    def one_in_flight(a, b):
        return a.kind == "BW" and b.kind == "F" and b.microbatch >= a.microbatch + 2 - a.stage

    schedule = make_schedule(before(one_in_flight), num_ranks=2, num_microbatches=4)
    assert schedule.rows == make_schedule("1f1b", num_ranks=2, num_microbatches=4).rows


def test_list_scheduling_prefers_b_then_f_then_w():
    schedule = list_schedule(StageGraph.chain(2), 3)
    assert schedule.as_text() == (
        "0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2\n1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2"
    )
    check(schedule)


def test_contradictions_are_refused():
    rule = before(lambda a, b: a.kind == b.kind == "F")
    text = refused(rule, num_ranks=1)
    assert "No order keeps both the dataflow and the predicate:" in text
    assert "`0F0` on rank 0 waits for `0F1`." in text
    against = before(lambda a, b: a.kind == "BW" and b.kind == "F")
    assert "`0F0` on rank 0 waits for " in refused(against, num_ranks=1)


def test_before_with_a_split_backward_and_forward_only():
    rule = before(lambda a, b: False, kinds=("F", "B", "W"))
    assert made(rule).kinds == {F, B, W}
    assert made(rule, forward_only=True).kinds == {F}
