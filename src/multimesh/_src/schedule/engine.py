"""The event loop of the simulator: runs the rows of an expanded schedule against a clock.

Every rank runs its row strictly in order; a task outside the ranks starts once it is ready and its
devices are free. Events are taken in the order of start times, ties by lower row, so the order in
which they are taken is the global order, and it respects dataflow also where actions cost nothing.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from multimesh._src.schedule.actions import Kind, Pair
from multimesh._src.schedule.costs import Costs, Latency, latency_of
from multimesh._src.schedule.expand import Expanded
from multimesh._src.schedule.graph import Part

_RETRY = -1  # in place of an agent: a row's devices may be free for what is parked there


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened. The k-th event ran an entry of row `rows[k]`.

    Attributes:
        rows: Rows of the events in the order of start times.
        positions: For a rank the position in its row; for a task outside the ranks
            `task * m + microbatch`.
        starts: Start times.
        ends: End times.
        ran: Per instance the event that ran it, or -1.
        reached: Per rank how many entries of its row ran: all, unless it is stuck.
    """

    rows: list[int]
    positions: list[int]
    starts: list[float]
    ends: list[float]
    ran: list[int]
    reached: list[int]


def run(expanded: Expanded, costs: Costs, latency: Latency) -> Trace:
    """Runs the schedule until nothing can start any more."""
    return _Machine(expanded, costs, latency).run()


class _Machine:
    """The state of a run.

    An agent is a rank, or one run of a task outside the ranks: `num_ranks + task * m +
    microbatch`. A task whose devices are busy when it is ready is parked. Where it shares them
    with one rank, it goes before that rank's actions of later microbatches; where it needs
    several ranks at once, they start nothing before it, or it would wait for ever.
    """

    def __init__(self, expanded: Expanded, costs: Costs, latency: Latency) -> None:
        m = expanded.num_microbatches
        graph = expanded.graph
        self.expanded = expanded
        self.m = m
        self.num_ranks = len(expanded.rows)
        self.nodes = [tuple(n * m for n in unit.nodes) for unit in expanded.units]
        # Per unit what it needs: (first instance of the source, latency), at distance 0 and above.
        self.needs: list[list[tuple[int, float]]] = []
        self.carried: list[list[tuple[int, float, int]]] = []
        for unit in expanded.units:
            found = [
                (graph.index[e.source] * m, latency_of(latency, e), e.distance) for e in unit.edges
            ]
            self.needs.append([(source, wait) for source, wait, far in found if far == 0])
            self.carried.append([need for need in found if need[2] > 0])
        self.durations = _durations(expanded, costs)
        self.pair_durations = _pair_durations(expanded, costs, self.durations)
        self.free = [0.0] * graph.num_rows
        self.parked: list[list[tuple[int, int]]] = [[] for _ in self.free]  # (microbatch, agent)
        self.greedy = [sum(other < self.num_ranks for other in b) > 1 for b in expanded.blocked]
        self.events: list[tuple[float, int, int]] = []  # (start, row, agent)
        self.waiting: dict[int, list[int]] = {}  # agents that wait for an instance
        self.trace = Trace([], [], [], [], [-1] * (len(graph.nodes) * m), [0] * self.num_ranks)

    def run(self) -> Trace:
        for agent in range(self.num_ranks + len(self.expanded.outside) * self.m):
            self.wake(agent)
        events, free, blocked = self.events, self.free, self.expanded.blocked
        while events:
            start, row, agent = heappop(events)
            if blocked[row] or row >= self.num_ranks:
                self.arbitrate(start, row, agent)
            else:
                free[row] = self.commit(start, row, agent)
                self.wake(agent)
        return self.trace

    def arbitrate(self, start: float, row: int, agent: int) -> None:
        """Runs an event whose devices others may want or hold, or puts it off."""
        if row < self.num_ranks:
            until = max(self.free[row], self.precedence(start, row))
            if until > start:
                heappush(self.events, (until, row, agent))
            else:
                self.occupy(start, row, agent)
            return
        if agent != _RETRY:
            heappush(self.parked[row], ((agent - self.num_ranks) % self.m, agent))
            if self.free[row] > start:
                heappush(self.events, (self.free[row], row, _RETRY))
        if self.parked[row] and self.free[row] <= start:
            self.occupy(start, row, heappop(self.parked[row])[1])

    def precedence(self, start: float, rank: int) -> float:
        """Lets parked tasks go before the rank's next action; returns when the rank is free."""
        position = self.trace.reached[rank]
        for other in self.expanded.blocked[rank]:
            parked = self.parked[other]
            if not parked:
                continue
            greedy, free = self.greedy[other], self.free[other]
            if greedy and free > start:
                return free
            microbatch = self.expanded.rows[rank].microbatches[position]
            if free <= start and (greedy or microbatch > parked[0][0]):
                self.occupy(start, other, heappop(parked)[1])
                return self.free[rank]
        return start

    def occupy(self, start: float, row: int, agent: int) -> None:
        """Runs an event on devices that rows share, and looks at what is parked there again."""
        end = self.commit(start, row, agent)
        for other in (row, *self.expanded.blocked[row]):
            self.free[other] = max(self.free[other], end)
            if self.parked[other]:
                heappush(self.events, (self.free[other], other, _RETRY))
        if agent < self.num_ranks:
            self.wake(agent)

    def wake(self, agent: int) -> None:
        """Schedules the agent's next event, or lets it wait for the first thing that it lacks."""
        if agent < self.num_ranks:
            position = self.trace.reached[agent]
            todo = self.expanded.rows[agent]
            if position == len(todo.units):
                return
            start = self.ready(todo.units[position], todo.microbatches[position], agent)
            if start >= 0.0 and position in todo.seconds:
                second = self.ready(*todo.seconds[position], agent)
                start = max(start, second) if second >= 0.0 else second
            if start >= 0.0:
                free = self.free[agent]
                heappush(self.events, (start if start > free else free, agent, agent))
            return
        task, microbatch = divmod(agent - self.num_ranks, self.m)
        start = self.ready(self.expanded.outside[task], microbatch, agent)
        if start >= 0.0:
            heappush(self.events, (start, self.expanded.graph.outside[task].row, agent))

    def ready(self, unit: int, microbatch: int, agent: int) -> float:
        """When all that the unit needs is there; -1 if the agent now waits for something."""
        ran, ends = self.trace.ran, self.trace.ends
        start = 0.0
        for source, latency in self.needs[unit]:
            event = ran[source + microbatch]
            if event < 0:
                self.waiting.setdefault(source + microbatch, []).append(agent)
                return -1.0
            there = ends[event] + latency
            if there > start:
                start = there
        for source, latency, distance in self.carried[unit]:
            if microbatch < distance:
                continue
            event = ran[source + microbatch - distance]
            if event < 0:
                self.waiting.setdefault(source + microbatch - distance, []).append(agent)
                return -1.0
            start = max(start, ends[event] + latency)
        return start

    def commit(self, start: float, row: int, agent: int) -> float:
        """Runs the agent's next entry and wakes who waited for it; returns its end."""
        trace = self.trace
        second: tuple[int, int] | None = None
        if agent < self.num_ranks:
            position = trace.reached[agent]
            trace.reached[agent] = position + 1
            todo = self.expanded.rows[agent]
            unit, microbatch = todo.units[position], todo.microbatches[position]
            if todo.seconds:
                second = todo.seconds.get(position)
        else:
            position = agent - self.num_ranks
            task, microbatch = divmod(position, self.m)
            unit = self.expanded.outside[task]
        duration = self.durations[unit]
        if second is not None:
            duration = self.pair_durations[unit, second[0]]
        event = len(trace.ends)
        trace.rows.append(row)
        trace.positions.append(position)
        trace.starts.append(start)
        trace.ends.append(start + duration)
        self.publish(unit, microbatch, event)
        if second is not None:
            self.publish(*second, event)
        return start + duration

    def publish(self, unit: int, microbatch: int, event: int) -> None:
        """Marks the instances of a unit as run; wakes the agents that wait for them."""
        for node in self.nodes[unit]:
            self.trace.ran[node + microbatch] = event
        for node in self.nodes[unit]:
            if node + microbatch in self.waiting:
                for agent in self.waiting.pop(node + microbatch):
                    self.wake(agent)


def _durations(expanded: Expanded, costs: Costs) -> list[float]:
    """The cost of every unit; the BW of a split stage costs its parts unless it has an entry."""
    durations: list[float] = []
    for unit in expanded.units:
        parts = [expanded.graph.nodes[n] for n in unit.nodes]
        first = parts[0] if parts else None
        if len(parts) == 2 and isinstance(first, Part):
            parts = [Part(Kind.BW, first.stage)]
        durations.append(sum(map(costs.of, parts)))
    return durations


def _pair_durations(
    expanded: Expanded, costs: Costs, durations: list[float]
) -> dict[tuple[int, int], float]:
    """The cost of every (unit, unit) that stands in a row as an overlapped pair."""
    pairs: dict[tuple[int, int], float] = {}
    for row, todo in zip(expanded.schedule.rows, expanded.rows, strict=True):
        for position, (second, _) in todo.seconds.items():
            key = todo.units[position], second
            entry = row[position]
            if key not in pairs and isinstance(entry, Pair):
                first, other = (Part(a.kind, a.stage) for a in (entry.first, entry.second))
                apart = durations[key[0]] + durations[second]
                pairs[key] = costs.of_pair(first, other, apart)
    return pairs
