"""The text of actions and rows, and what is said about wrong text."""

import pytest
from hypothesis import given, strategies as st

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import (
    Action,
    Kind,
    Pair,
    TaskRun,
    parse_entry,
    parse_row,
    parse_rows,
    print_row,
    print_rows,
)

actions = st.builds(Action, st.sampled_from(Kind), st.integers(0, 99), st.integers(0, 999))
entries = actions | st.builds(Pair, actions, actions)
rows = st.lists(st.lists(entries, max_size=5).map(tuple), max_size=4).map(tuple)


@given(rows)
def test_print_and_parse_are_inverse(rows):
    assert parse_rows(print_rows(rows)) == rows
    assert all(parse_row(print_row(row)) == row for row in rows)


def test_text():
    row = (Action(Kind.F, 0, 3), Pair(Action(Kind.F, 0, 4), Action(Kind.BW, 7, 1)))
    assert print_row(row) == "0F3 [0F4|7BW1]"
    assert str(TaskRun("tower", 3)) == "tower:3"


def test_comments_blank_lines_and_empty_rows():
    text = "# warm-up\n\n0F0  0BW0 # the rest\n-\n"
    assert parse_rows(text) == (parse_row("0F0 0BW0"), ())
    assert parse_row("") == ()


@pytest.mark.parametrize("word", ["F0", "0X1", "0F", "-1F0", "0f0", "[0F1|0B2", "[0F1]", "0F0,"])
def test_wrong_words(word):
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_entry(word)
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_rows(f"0F0 {word}")


def test_the_error_points_at_every_wrong_word():
    with pytest.raises(ScheduleError) as error:
        parse_rows("0F0 0BW0\n1F0 oops 1BW0 1Z0\n", source="rows.txt")
    assert str(error.value) == (
        "`oops` in line 2 is not an action:\n"
        "    1F0 oops 1BW0 1Z0\n"
        "        ^^^^\n"
        "`1Z0` in line 2 is not an action:\n"
        "    1F0 oops 1BW0 1Z0\n"
        "                  ^^^\n"
        "  at rows.txt\n"
        "To mend it: write an action as `<stage><kind><microbatch>` with kind F, B, W or BW, "
        "as in `2F0`, and an overlapped pair as `[0F3|7BW1]`."
    )


def test_at_most_five_problems():
    with pytest.raises(ScheduleError, match="and 2 more"):
        parse_rows(" ".join("abcdefg"))
