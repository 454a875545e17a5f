"""Schedules by list scheduling: greedy rows that keep a user's "a before b".

At unit cost, a rank that is free starts the best action that is ready: W last, B before F, then
the lower microbatch, then the higher stage. Without a predicate this is a schedule for any
placement and any stage graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import permutations

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import Action, Kind, Row
from multimesh._src.schedule.graph import Part, StageGraph
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

    Args:
        predicate: Takes two actions of one rank. What it leaves open is completed by list
            scheduling at unit cost: B before F before W, then the lower microbatch, then the
            higher stage.
        kinds: The kinds of action to schedule, `F` and `BW`, or `F`, `B` and `W`.

    Returns:
        A rule, to be given as `schedule=` or to `make_schedule`, which raises `ScheduleError` if
        the predicate contradicts itself or the dataflow.

    >>> gpipe = before(lambda a, b: a.kind == "F" and b.kind == "BW")
    >>> print(make_schedule(gpipe, num_ranks=2, num_microbatches=2))
    0F0 0F1 0BW0 0BW1
    1F0 1F1 1BW0 1BW1
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
    rows = _Lister(graph, actions, num_microbatches, predicate).run()
    return Schedule(name, rows, graph.placement, num_microbatches)


def _priority(action: Action) -> tuple[int, int, int]:
    return _URGENCY[action.kind], action.microbatch, -action.stage


def _actions_by_rank(graph: StageGraph, num_microbatches: int) -> list[list[Action]]:
    """The actions of every rank, the most urgent first."""
    rows: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
    for node in graph.nodes:
        if isinstance(node, Part):
            row = rows[graph.placement[node.stage]]
            row += (Action(node.kind, node.stage, i) for i in range(num_microbatches))
    return [sorted(row, key=_priority) for row in rows]


class _Lister:
    """Greedy scheduling against a clock. Tasks outside the ranks run as soon as they are ready.

    Jobs are numbered rank after rank, the most urgent action of a rank first, then the runs of
    outside tasks: on every rank the ready job with the lowest number is the best.
    """

    def __init__(
        self, graph: StageGraph, actions: list[list[Action]], m: int, predicate: Predicate
    ) -> None:
        self.graph = graph
        self.actions = [action for row in actions for action in row]
        self.rank_of = [rank for rank, row in enumerate(actions) for _ in row]
        job_of = {
            graph.index[Part(a.kind, a.stage)] * m + a.microbatch: job
            for job, a in enumerate(self.actions)
        }
        for task in graph.outside:
            for i in range(m):
                job_of[graph.index[task] * m + i] = len(job_of)
        self.waits = [0] * len(job_of)  # per job how many others it still waits for
        self.users: list[list[int]] = [[] for _ in job_of]  # per job who waits for it
        for edge in graph.edges:
            source, target = graph.index[edge.source] * m, graph.index[edge.target] * m
            for i in range(edge.distance, m):
                self.must_follow(job_of[source + i - edge.distance], job_of[target + i])
        if predicate is not _never:
            self.add_predicate(predicate)
        self.ready: list[list[int]] = [[] for _ in actions]
        self.busy = [False] * len(actions)
        self.running: list[tuple[int, int]] = []  # (end, job)
        self.rows: list[list[Action]] = [[] for _ in actions]

    def must_follow(self, first: int, second: int) -> None:
        self.waits[second] += 1
        self.users[first].append(second)

    def add_predicate(self, predicate: Predicate) -> None:
        for rank in range(self.graph.num_ranks):
            jobs = [job for job, of in enumerate(self.rank_of) if of == rank]
            for first, second in permutations(jobs, 2):
                if predicate(self.actions[first], self.actions[second]):
                    self.must_follow(first, second)

    def run(self) -> tuple[Row, ...]:
        first = [job for job, count in enumerate(self.waits) if count == 0]
        self.start(0, self.release(0, first))
        while self.running:
            now = self.running[0][0]
            released: list[int] = []
            touched: set[int] = set()
            while self.running and self.running[0][0] == now:
                job = heappop(self.running)[1]
                if job < len(self.actions):
                    self.busy[self.rank_of[job]] = False
                    touched.add(self.rank_of[job])
                released += self.finish(job)
            self.start(now, touched | self.release(now, released))
        if any(self.waits):
            raise ScheduleError(self.stuck())
        return tuple(map(tuple, self.rows))

    def finish(self, job: int) -> list[int]:
        """The jobs that waited for this one last."""
        freed: list[int] = []
        for user in self.users[job]:
            self.waits[user] -= 1
            if self.waits[user] == 0:
                freed.append(user)
        return freed

    def release(self, now: int, jobs: list[int]) -> set[int]:
        """Makes jobs ready; returns the ranks that got some."""
        ranks: set[int] = set()
        for job in jobs:
            if job >= len(self.actions):
                heappush(self.running, (now + 1, job))
                continue
            heappush(self.ready[self.rank_of[job]], job)
            ranks.add(self.rank_of[job])
        return ranks

    def start(self, now: int, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            if self.ready[rank] and not self.busy[rank]:
                job = heappop(self.ready[rank])
                self.busy[rank] = True
                self.rows[rank].append(self.actions[job])
                length = 2 if self.actions[job].kind is Kind.BW else 1
                heappush(self.running, (now + length, job))

    def stuck(self) -> str:
        left = [job for job, count in enumerate(self.waits) if count and job < len(self.actions)]
        holders = {user: job for job in left for user in self.users[job]}
        problems = [
            f"`{self.actions[job]}` on {self.graph.label(self.rank_of[job])} waits for "
            f"`{self.actions[holders[job]]}`."
            for job in left
            if job in holders
        ]
        return message(
            "No order keeps both the dataflow and the predicate:\n" + listed(problems),
            ways=["let `predicate(a, b)` hold for fewer pairs: what it asks for forms a circle"],
        )
