"""What a schedule runs together."""

from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.neighbours import adjacent_parts, overlapped_parts
from multimesh._src.schedule.schedule import parse_schedule


def names(found):
    return [(str(a), str(b)) for a, b in found]


def test_adjacent_parts():
    schedule = make_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert names(adjacent_parts(schedule)) == [("2F", "2BW")]
    assert names(adjacent_parts(parse_schedule("0F0 0BW0 0F1 0BW1"))) == [("0F", "0BW")]
    assert names(adjacent_parts(parse_schedule("0F0 0F1 0BW0 0BW1"))) == []
    assert names(adjacent_parts(parse_schedule("0F0 0BW0 0F1 [0F2|0BW1] 0BW2"))) == []


def test_overlapped_parts():
    schedule = make_schedule("dualpipe-v", num_ranks=2, num_microbatches=6)
    assert sorted(names(overlapped_parts(schedule))) == [
        ("0F", "3BW"),
        ("1F", "2BW"),
        ("2F", "1BW"),
        ("3F", "0BW"),
    ]
    assert overlapped_parts(make_schedule("gpipe", num_ranks=2, num_microbatches=6)) == ()
