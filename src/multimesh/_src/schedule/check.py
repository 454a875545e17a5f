"""`check`: is a schedule complete, legal and free of deadlocks on a stage graph?"""

from collections.abc import Iterator

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import Action, Kind, actions_of
from multimesh._src.schedule.costs import Costs
from multimesh._src.schedule.deadlock import explain_deadlock
from multimesh._src.schedule.engine import run
from multimesh._src.schedule.expand import Expanded, expand
from multimesh._src.schedule.graph import Node, Part, StageGraph, check_graph, fit
from multimesh._src.schedule.placement import placement_message
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.window import window


def check(
    schedule: Schedule, graph: StageGraph | None = None, num_microbatches: int | None = None
) -> None:
    """Checks that a schedule runs every action of a stage graph, each once, in a legal order.

    Args:
        schedule: The schedule, already without actions that the graph lacks (see `fit`).
        graph: The program's stage graph; the textbook chain of the schedule's kinds by default.
        num_microbatches: How many microbatches there are; by default as the schedule says.

    Raises:
        ScheduleError: The schedule has other ranks or another placement than the graph, lacks an
            action, has one twice, one that does not exist or one in a wrong row, or its order is
            against the dataflow or deadlocks. All problems of one kind, at most five.

    >>> check(parse_schedule("0F0 0BW0 0F1 0BW1"))
    """
    graph = chain_of(schedule) if graph is None else graph
    m = schedule.num_microbatches if num_microbatches is None else num_microbatches
    check_graph(graph)
    _check_placement(schedule, graph)
    _check_complete(schedule, graph, m)
    expanded = expand(schedule, graph, m)
    trace = run(expanded, Costs(), 0.0)
    if min(trace.ran, default=0) < 0:
        raise ScheduleError(explain_deadlock(expanded, trace))


def prepare(schedule: Schedule, graph: StageGraph | None) -> tuple[Schedule, StageGraph, Expanded]:
    """Fits a schedule to a graph and expands it.

    Raises:
        ScheduleError: The schedule has another placement, or actions that do not exist.
    """
    if graph is None:
        graph = chain_of(schedule)
    else:
        check_graph(graph)
        _check_placement(schedule, graph)
        schedule = fit(schedule, graph)
    problems = [*_strangers(schedule, graph, schedule.num_microbatches)]
    if problems:
        raise ScheduleError(_told(schedule, graph, schedule.num_microbatches, problems))
    return schedule, graph, expand(schedule, graph, schedule.num_microbatches)


def chain_of(schedule: Schedule) -> StageGraph:
    """The textbook chain on the placement of a schedule, with the kinds that it uses."""
    return StageGraph.chain(schedule.num_ranks, placement=schedule.placement, kinds=schedule.kinds)


def _check_placement(schedule: Schedule, graph: StageGraph) -> None:
    if schedule.num_ranks != graph.num_ranks:
        raise ScheduleError(
            message(
                f"Schedule `{schedule.name}` has `{schedule.num_ranks}` rows, but the program has "
                f"`{graph.num_ranks}` ranks.",
                ways=["give one row for every submesh that holds stages, in the order of stages"],
            )
        )
    if schedule.placement != graph.placement:
        raise ScheduleError(placement_message(schedule.name, schedule.placement, graph.placement))


# A problem: its sentence and the (rank, position) to point at; position -1 where there is none.
Problem = tuple[str, int, int]


def _told(
    schedule: Schedule, graph: StageGraph, num_microbatches: int, problems: list[Problem]
) -> str:
    shown = next(((r, k) for _, r, k in problems if k >= 0), None)
    grid = window(schedule, graph, *shown) if shown else ""
    way = (
        "let the row of each rank run every action of its stages once for each of the "
        f"`{num_microbatches}` microbatches, and nothing else"
    )
    return message(listed([text for text, _, _ in problems]), window=grid, ways=[way])


def _check_complete(schedule: Schedule, graph: StageGraph, m: int) -> None:
    problems = [*_strangers(schedule, graph, m)]
    if problems:
        raise ScheduleError(_told(schedule, graph, m, problems))
    ran = [-1] * (len(graph.nodes) * m)
    stages = range(len(graph.placement))
    covers = {(kind, stage): graph.covers(kind, stage) for kind in Kind for stage in stages}
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in (entry,) if isinstance(entry, Action) else actions_of(entry):
                for node in covers[action.kind, action.stage]:
                    instance = node * m + action.microbatch
                    if ran[instance] >= 0:
                        text = _twice(graph.nodes[node], action, graph.label(rank))
                        problems.append((text, rank, position))
                    ran[instance] = position
    problems += _missing(schedule, graph, m, ran)
    if problems:
        raise ScheduleError(_told(schedule, graph, m, problems))


def _twice(node: Node, action: Action, label: str) -> str:
    what = f"{node}{action.microbatch}"
    by = "" if what == str(action) else f" (the second time as part of `{action}`)"
    return f"`{what}` runs twice on {label}{by}."


def _missing(schedule: Schedule, graph: StageGraph, m: int, ran: list[int]) -> Iterator[Problem]:
    for instance, position in enumerate(ran):
        if position >= 0:
            continue
        node, microbatch = divmod(instance, m)
        part = graph.nodes[node]
        if isinstance(part, Part):
            rank = graph.placement[part.stage]
            yield f"`{part}{microbatch}` is missing in the row of {graph.label(rank)}.", rank, -1


def _strangers(schedule: Schedule, graph: StageGraph, m: int) -> Iterator[Problem]:
    """Actions that do not exist, or stand in the row of a rank that does not hold their stage."""
    placement = graph.placement
    known = {
        (kind, stage): rank
        for stage, rank in enumerate(placement)
        for kind in Kind
        if graph.covers(kind, stage)
    }
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            for action in (entry,) if isinstance(entry, Action) else actions_of(entry):
                fits = known.get((action.kind, action.stage)) == rank
                if not fits or not 0 <= action.microbatch < m:
                    yield _stranger(action, rank, graph, m), rank, position


def _stranger(action: Action, rank: int, graph: StageGraph, m: int) -> str:
    stages, stage = len(graph.placement), action.stage
    here = f"`{action}` in the row of {graph.label(rank)}"
    if not 0 <= stage < stages:
        return f"{here} is of stage `{stage}`; there are `{stages}`."
    if not 0 <= action.microbatch < m:
        return f"{here} is of microbatch `{action.microbatch}`; there are `{m}`."
    if not graph.covers(action.kind, stage):
        return f"{here} does not exist: stage `{stage}` has no `{action.kind}`."
    return f"{here} belongs to {graph.label(graph.placement[stage])}, which holds stage `{stage}`."
