"""Schedules by list scheduling: greedy rows that keep a user's "a before b".

At unit cost, a rank that is free starts the best action that is ready: W last, B before F, then
the lower microbatch, then the higher stage. Without a predicate this is a schedule for any
placement and any stage graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.expand import Expanded, expand
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.rule import Request
from multimesh._src.schedule.schedule import Schedule

Predicate = Callable[[Action, Action], bool]

_URGENCY = {Kind.B: 0, Kind.BW: 0, Kind.F: 1, Kind.W: 2}


def _never(first: Action, second: Action) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Before:
    """A schedule given by what must run before what.

    Attributes:
        predicate: Whether the first action must run before the second. It is asked for every two
            actions of one rank; only the order within a rank is a schedule's to decide.
        kinds: The kinds of action, where the program leaves the choice.
        name: The name of the schedule.
    """

    predicate: Predicate = _never
    kinds: tuple[Kind, ...] = (Kind.F, Kind.BW)
    name: str = "custom"

    def make(self, request: Request) -> Schedule:
        """Completes the predicate to rows.

        Raises:
            ScheduleError: The predicate contradicts itself or the dataflow.
        """
        graph = request.graph(self.kinds)
        return list_schedule(
            graph, request.num_microbatches, predicate=self.predicate, name=self.name
        )


def before(predicate: Predicate, *, kinds: tuple[Kind | str, ...] = ("F", "BW")) -> Before:
    """A schedule from a predicate "must action a run before action b".

    >>> in_order = before(lambda a, b: a.kind == b.kind and a.microbatch < b.microbatch)
    """
    return Before(predicate, tuple(map(Kind, kinds)))


def list_schedule(
    graph: StageGraph, num_microbatches: int, *, predicate: Predicate = _never, name: str = "list"
) -> Schedule:
    """Makes rows for a stage graph by list scheduling at unit cost.

    Raises:
        ScheduleError: The predicate contradicts itself or the dataflow.
    """
    actions = _actions_by_rank(graph, num_microbatches)
    order = tuple(tuple(sorted(row, key=_priority)) for row in actions)
    draft = Schedule(name, order, graph.placement, num_microbatches)
    rows = _Lister(expand(draft, graph, num_microbatches), predicate).run()
    return Schedule(name, rows, graph.placement, num_microbatches)


def _priority(action: Action) -> tuple[int, int, int]:
    return _URGENCY[action.kind], action.microbatch, -action.stage


def _actions_by_rank(graph: StageGraph, num_microbatches: int) -> list[list[Action]]:
    rows: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
    for node in graph.nodes:
        if node not in graph.outside:
            row = rows[graph.placement[node.stage]]
            row += (Action(node.kind, node.stage, i) for i in range(num_microbatches))
    return rows


class _Lister:
    """Runs steps of unit length; outside tasks run as soon as they are ready."""

    def __init__(self, expanded: Expanded, predicate: Predicate) -> None:
        self.expanded = expanded
        self.done: set[int] = set()  # instances that have ended
        self.outside = [
            (unit, i) for unit in expanded.outside for i in range(expanded.num_microbatches)
        ]
        # Per rank the positions that are left, best first, and what each waits for on its rank.
        self.left = [list(range(len(row))) for row in expanded.schedule.rows]
        self.after = [_predecessors(row, predicate) for row in expanded.schedule.rows]
        self.ran: list[list[int]] = [[] for _ in self.left]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        while any(self.left):
            chosen = [(rank, k) for rank in range(len(self.left)) if (k := self.best(rank)) >= 0]
            ended = [unit for unit in self.outside if self.ready(*unit)]
            if not chosen and not ended:
                raise ScheduleError(self.stuck())
            for rank, position in chosen:
                self.left[rank].remove(position)
                self.ran[rank].append(position)
                ended.append(self.unit(rank, position))
            self.outside = [unit for unit in self.outside if unit not in ended]
            m = self.expanded.num_microbatches
            self.done |= {n * m + i for unit, i in ended for n in self.expanded.units[unit].nodes}
        rows = self.expanded.schedule.rows
        return tuple(tuple(rows[r][k] for k in ran) for r, ran in enumerate(self.ran))

    def unit(self, rank: int, position: int) -> tuple[int, int]:
        row = self.expanded.rows[rank]
        return row.units[position], row.microbatches[position]

    def ready(self, unit: int, microbatch: int) -> bool:
        m, index = self.expanded.num_microbatches, self.expanded.graph.index
        return all(
            microbatch < edge.distance
            or index[edge.source] * m + microbatch - edge.distance in self.done
            for edge in self.expanded.units[unit].edges
        )

    def best(self, rank: int) -> int:
        """The position of the best action that may run now, or -1."""
        left = set(self.left[rank])
        for position in self.left[rank]:
            allowed = not self.after[rank] or left.isdisjoint(self.after[rank][position])
            if allowed and self.ready(*self.unit(rank, position)):
                return position
        return -1

    def stuck(self) -> str:
        problems = []
        for rank, left in enumerate(self.left):
            row, label = self.expanded.schedule.rows[rank], self.expanded.graph.label(rank)
            for position in left[:1]:
                held = sorted(set(left) & self.after[rank][position])
                by = ", ".join(f"`{row[k]}`" for k in held[:3]) or "other ranks"
                problems.append(f"On {label} `{row[position]}` still waits for {by}.")
        return message(
            "No order keeps both the dataflow and the predicate:\n" + listed(problems),
            ways=["ask for fewer actions before others: `predicate(a, b)` must not form a circle"],
        )


def _predecessors(row: tuple[Action, ...], predicate: Predicate) -> list[frozenset[int]]:
    if predicate is _never:
        return [frozenset()] * len(row)
    return [
        frozenset(k for k, first in enumerate(row) if first != action and predicate(first, action))
        for action in row
    ]
