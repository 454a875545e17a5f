"""Grids, comparisons, and the choice of `auto`."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from multimesh._src.errors import ScheduleError
from multimesh._src.schedule.actions import Kind
from multimesh._src.schedule.auto import Auto, auto
from multimesh._src.schedule.compare import compare
from multimesh._src.schedule.costs import Memory
from multimesh._src.schedule.graph import Edge, OutsideTask, Part, StageGraph
from multimesh._src.schedule.grid import grid
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.rule import Request
from multimesh._src.schedule.schedule import parse_schedule
from multimesh._src.schedule.simulate import simulate


def test_grid():
    assert grid(make_schedule("1f1b", num_ranks=2, num_microbatches=3)) == (
        "1f1b: makespan 12, idle 25.0%\n"
        "rank 0  0F0 0F1 .   .   0BW0--- 0F2 0BW1--- .   0BW2---\n"
        "rank 1  .   1F0 1BW0--- 1F1 1BW1--- 1F2 1BW2--- .   ."
    )


def test_grid_of_zb_v():
    drawn = grid(make_schedule("zb-v", num_ranks=2, num_microbatches=4))
    assert drawn == (
        "zb-v: makespan 25, idle 4.0%\n"
        "rank 0  0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3"
        " 0B2 0W2 0B3 0W3 .\n"
        "rank 1  .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2"
        " 2B3 1B3 1W2 2W3 1W3"
    )


def test_grid_goes_on_below():
    schedule = make_schedule("dualpipe-v", num_ranks=1, num_microbatches=2)
    assert grid(schedule, width=30) == (
        "dualpipe-v: makespan 12, idle 0.0%\n"
        "rank 0  0F0 1F0 0F1 1BW0---\n\n"
        "rank 0  [1F1|0BW0]- 1BW1---\n\n"
        "rank 0  0B1 0W1"
    )


def test_grid_in_colour():
    schedule = make_schedule("dualpipe-v", num_ranks=1, num_microbatches=2)
    plain = grid(schedule, width=18)
    colored = grid(schedule, width=18, color=True)
    assert "\033" not in plain
    assert "\033[30;44m0F0\033[0m \033[30;104m1F0\033[0m" in colored
    assert re.sub("\033\\[[0-9;]*m", "", colored) == plain


def test_grid_of_a_simulation_with_latency_and_a_tower():
    chain = StageGraph.chain(1, kinds=("F",))
    graph = StageGraph(chain.placement, (*chain.nodes, OutsideTask("t", 1)), (), 1, ("stage=0",))
    found = simulate(parse_schedule("0F0 0F1"), graph, costs={"F": 2, "t": 1})
    assert grid(found).splitlines()[1:] == ["stage=0  0F0---- 0F1----", "row 1    t:0 t:1 .   ."]


def shown(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def test_compare():
    schedules = [
        make_schedule(name, num_ranks=4, num_microbatches=8) for name in ("1f1b", "zb-h1", "zb-v")
    ]
    lines = shown(compare(schedules)).splitlines()
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if "│" in line}
    found = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    assert found == {
        "1f1b": ["33", "9", "9", "27.3%", "4", "4"],
        "zb-h1": ["27", "3", "3", "11.1%", "4", "4"],
        "zb-v": ["51", "0", "3", "5.9%", "8", "8"],
    }


def test_compare_with_bytes_and_simulations():
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    text = shown(compare([schedule], memory=Memory(residual=1024), costs={"F": 2}))
    assert "peak bytes" in text
    assert "2048" in text
    assert "peak bytes" not in shown(compare([simulate(schedule)]))


def test_auto_takes_the_shortest():
    choice = auto().choose(Request(num_ranks=4, num_microbatches=8))
    assert choice.schedule.name == "zb-h1"
    assert choice.simulation.makespan == 27
    assert choice.reasons[0] == "`auto` chose `zb-h1`: the shortest of `7` candidates."
    assert len(choice.reasons) == 8
    assert choice.reasons[1].startswith("`gpipe`: makespan `33`, bubble `27.3%`, at most `8` sets")
    assert make_schedule("auto", num_ranks=4, num_microbatches=8) == choice.schedule


def test_auto_in_little_memory():
    # On two ranks with two chunks zb-v holds 4 sets, dualpipe-v and interleaved-1f1b hold 5.
    request = Request(num_ranks=2, num_microbatches=4, num_chunks=2)
    rule = auto(memory=Memory(residual=10, waiting=10), limit=40)
    choice = rule.choose(request)
    assert choice.schedule.name == "zb-v"
    assert choice.reasons[0].startswith("`auto` chose `zb-v`: the shortest that fits")
    (line,) = [line for line in choice.reasons if line.startswith("`dualpipe-v`")]
    assert line.endswith("`50` bytes; does not fit: rank `0` may hold `40` bytes.")


def test_auto_takes_less_memory_when_equally_long():
    unsplit = StageGraph.chain(2, kinds=("F", "BW"))
    schedule = make_schedule(auto(memory=Memory(1)), num_ranks=2, num_microbatches=8, graph=unsplit)
    assert schedule.name == "1f1b"


def test_auto_with_latency_prefers_the_eager_order():
    request = Request(num_ranks=4, num_microbatches=12)
    unsplit = StageGraph.chain(4, kinds=("F", "BW"))
    rule = auto(costs={"F": 2, "BW": 4}, latency=1, memory=Memory(1), limit=8)
    choice = rule.choose(replace(request, graphs=(unsplit,), placement=unsplit.placement))
    assert choice.schedule.name == "eager-1f1b"


def test_auto_keeps_to_the_placement():
    request = Request(num_ranks=2, num_microbatches=8, placement=(0, 1, 0, 1))
    choice = auto().choose(request)
    assert choice.schedule.name == "interleaved-1f1b"
    assert any("`zb-v`: not possible. Schedule `zb-v` wants" in line for line in choice.reasons)


def test_auto_when_nothing_fits():
    with pytest.raises(ScheduleError) as error:
        Auto(memory=Memory(residual=10), limit=5).make(Request(2, 4))
    assert "No built-in schedule does what is asked:" in str(error.value)
    assert "does not fit: rank `0` may hold `5` bytes." in str(error.value)


def test_auto_takes_list_scheduling_where_no_built_in_schedule_fits():
    choice = auto().choose(Request(num_ranks=3, num_microbatches=4, placement=(0, 1, 2, 1, 0)))
    assert choice.reasons[0] == "`auto` chose `list`: the shortest of `10` candidates."


def test_auto_fails_as_the_default_does():
    graph = StageGraph.chain(2, 2, kinds=("F",))
    back = Edge(Part(Kind.F, 2), Part(Kind.F, 0))
    turned = StageGraph(graph.placement, graph.nodes, (back,), 2)
    with pytest.raises(ScheduleError, match="in the order of the forward pass, but"):
        make_schedule("auto", num_ranks=2, num_microbatches=4, graph=turned)


def test_auto_on_the_programs_graph():
    graph = StageGraph.chain(2, kinds=("F",))
    schedule = make_schedule("auto", num_ranks=2, num_microbatches=4, graph=graph)
    assert {kind.value for kind in schedule.kinds} == {"F"}
