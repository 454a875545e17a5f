"""Names and numbers as tables show them."""

import pytest

from multimesh._src.report.labels import unique_labels
from multimesh._src.report.tables import (
    Table,
    amount,
    common_names,
    count,
    duration,
    merge_rows,
    share,
    shorten,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (96, "96 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"),
     (99_960, "100 kB"), (999_400, "999 kB"), (999_600, "1 MB"), (3.2e18, "3200 PB")],
)  # fmt: skip
def test_amount(number, text):
    assert amount(number, "B") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0"), (1e-9, "0"), (1.5e-6, "1.50 us"), (41.2e-3, "41.2 ms"), (310e-6, "310 us"),
     (0.9996e-3, "1.00 ms"), (0.99949e-3, "999 us"), (1.25, "1.25 s"), (75.0, "75.0 s"),
     (-2e-3, "-2.00 ms")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_share():
    assert (share(1, 3), share(-1e-9, 3), share(1, 0)) == ("33.3 %", "0.0 %", "-")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a"], ("a",)),
        (["l1", "l2"], ("l1", "l2")),
        (["l1", "l2", "l3"], ("l1 ... l3",)),
        (["l1", "l2", "l3", "x", "l4"], ("l1 ... l3", "x", "l4")),
        (["p[0].w1", "p[1].w1", "p[2].w1"], ("p[0].w1 ... p[2].w1",)),
        (["p[0][0]", "p[0][1]", "p[1][1]"], ("p[0][0]", "p[0][1]", "p[1][1]")),
        (["l1", "l3", "l5"], ("l1", "l3", "l5")),
        (["l8", "l9", "l10", "l11"], ("l8 ... l11",)),
        (["l1", "l2", "l3", "l2", "l1"], ("l1 ... l3", "l2", "l1")),
        (["f7", "f8", "f9", "b9", "b8", "b7"], ("f7 ... f9", "b9 ... b7")),
    ],
)
def test_shorten(names, short):
    assert shorten(names) == short


def test_rows_that_differ_in_their_name_alone_are_joined():
    rows = [(("a1",), "x"), (("a2",), "x"), (("b",), "y"), (("a3",), "x")]
    assert merge_rows(rows) == ((("a1", "a2"), "x"), (("b",), "y"), (("a3",), "x"))


def test_long_lists_of_names_are_wrapped_between_names():
    names = tuple(f"name{n}_{'ab'[n % 2]}" for n in range(8))
    text = Table("Title", ("names", ">size"), ((names, "12"),)).as_text()
    assert text.splitlines()[3].split()[-1] == "12"
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) < 50


def test_long_names_of_fused_tasks_are_shortened_and_wrapped():
    fused = "+".join([f"layer{n}_forward" for n in range(8)] + ["layer7_b", "layer6_b"])
    lines = Table("Title", ("task",), (((fused,),),)).as_text().splitlines()[3:]
    assert lines == ["  layer0_forward ... layer7_forward + layer7_b", "  + layer6_b"]


ROW = (("a_long_name_of_a_task",), "12.3 kB", "made in `model/layer0/attention` (model.py:12)")
WIDE = Table("Title", ("task", ">bytes", "where"), (ROW, ROW), note="a note of words " * 9)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_line_is_wider_than_asked_for_and_no_word_is_lost(width):
    text = WIDE.as_text(width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("12.3 kB") == 2
    joined = "".join(text.split())
    for words in ("model/layer0/", "attention`", "(model.py:12)", "12.3kB", "anoteofwords" * 9):
        assert words in joined, words


def test_optional_columns_go_first_where_there_is_no_room():
    table = Table("T", ("name", "kind", "from"), (("layer0", "F", "model.py:12"),), num_optional=1)
    assert "model.py:12" in table.as_text(40)
    assert "model.py" not in table.as_text(18)
    assert "layer0" in table.as_text(18)


def test_details_stand_below_their_rows():
    table = Table("T", ("a",), (("x",), ("y",)), details=("made in `f`", ""))
    assert table.as_text().splitlines()[3:] == ["  x", "      made in `f`", "  y"]


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["p[0]['w']", "p[0]['b']", "p[1]['w']"], ("p[0]", "p[1]['w']")),
        (["p[0]['w']", "p[0]['b']", "p[1]['w']", "p[1]['b']"], ("p",)),
        (["x"], ("x",)),
        (["s.mu['a']", "s.mu['b']"], ("s.mu",)),
        ([], ()),
    ],
)
def test_names_of_whole_subtrees_are_joined(names, common):
    known = ["p[0]['w']", "p[0]['b']", "p[1]['w']", "p[1]['b']", "x", "s.mu['a']", "s.mu['b']",
             "s.nu['a']"]  # fmt: skip
    assert common_names(names, known) == common


@pytest.mark.parametrize(("number", "text"), [(0, "0 copies"), (1, "1 copy"), (2, "2 copies")])
def test_counts(number, text):
    assert count(number, "copy", "copies") == text


def test_unique_labels():
    assert unique_labels(["main", "a", "main", "main"]) == ("main", "a", "main#2", "main#3")
