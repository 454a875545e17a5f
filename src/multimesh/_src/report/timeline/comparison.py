"""Measured against theoretical: a loop's schedule, simulated with the times of its tasks.

    work, spread evenly         24.0 ms   as if every rank had the same to do, without a pause
    bubble of `1f1b`             5.1      + the pauses that the schedule makes with equal stages
    uneven stages                3.2      + those that unequal stages make
    copies                       0.9      + those in which values are on their way
    host, and runs that vary     1.4      + what the simulation does not know
    the loop, measured          34.6

Each line is what one more simulation adds: with each kind's mean over the stages, with the time of
each node, and with the latency of each edge.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from multimesh._src.errors import ScheduleError
from multimesh._src.report.timeline.calls import Call
from multimesh._src.schedule.auto import Auto, Choice
from multimesh._src.schedule.costs import Costs
from multimesh._src.schedule.graph import Part, StageGraph
from multimesh._src.schedule.placement import num_chunks_of
from multimesh._src.schedule.rule import Request
from multimesh._src.schedule.simulate import Simulation, simulate

Latencies: TypeAlias = dict[tuple[str, str], float]
_Runs: TypeAlias = dict[str, dict[tuple[int, int], float]]  # name -> (call, which run) -> seconds


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A loop as it was measured and as it would be by its schedule. All times in seconds.

    Attributes:
        costs: The mean time of every node of the stage graph.
        latency: The mean time of the copies along every edge of it.
        measured: From the loop's first start to its last end, in the mean.
        even: The work of a rank if all had the same.
        equal_stages: The schedule's simulation with stages of equal cost.
        uneven_stages: The simulation with the costs that were measured.
        simulation: The same with the latency of copies: what theory can say.
    """

    costs: Costs
    latency: Latencies
    measured: float
    even: float
    equal_stages: Simulation
    uneven_stages: Simulation
    simulation: Simulation

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """What the measured time is made of: names and seconds, which add up to it."""
        makespans = [s.makespan for s in (self.equal_stages, self.uneven_stages, self.simulation)]
        ends = (0.0, self.even, *makespans, self.measured)
        names = (
            "work, spread evenly",
            f"bubble of `{self.simulation.schedule.name}`",
            "uneven stages",
            "copies",
            "host, and runs that vary",
        )
        return tuple(
            (name, after - before)
            for name, before, after in zip(names, ends[:-1], ends[1:], strict=True)
        )

    @property
    def measured_bubble(self) -> float:
        """The idle share of all ranks within the measured time, from 0 to 1."""
        return max(0.0, 1.0 - self.even / self.measured) if self.measured else 0.0

    @property
    def mean_latency(self) -> float:
        """The mean over the edges of the mean time of their copies."""
        return fmean(self.latency.values()) if self.latency else 0.0

    def best(self) -> Choice | None:
        """What `auto` would choose with these costs; None if it can do nothing of this size."""
        schedule = self.simulation.schedule
        request = Request(
            schedule.num_ranks,
            schedule.num_microbatches,
            num_chunks_of(schedule.placement),
            schedule.placement,
        )
        try:
            return Auto(self.costs, self.mean_latency).choose(request)
        except ScheduleError:
            return None


def compare_loop(calls: Sequence[Call], loop: int) -> Comparison | None:
    """Compares a loop with its schedule; None where it does not run once in each call.

    Args:
        calls: Measured calls of one step.
        loop: The index of one of its pipelined loops.
    """
    planned = calls[0].step.schedules[loop]
    graph, schedule = planned.graph, planned.schedule
    table = _node_seconds(calls, loop)
    if {str(node) for node in graph.nodes} - set(table) or _num_passes(calls[0], loop) > 1:
        return None
    costs, latency = Costs(_with_halves(table, graph)), _latencies(calls, loop, graph)
    even = Costs(_equal(table, graph))
    uneven_stages = simulate(schedule, graph, costs=costs)
    return Comparison(
        costs=costs,
        latency=latency,
        measured=fmean(_span(call, loop) for call in calls),
        even=sum(uneven_stages.busy) / graph.num_ranks,
        equal_stages=simulate(schedule, graph, costs=even),
        uneven_stages=uneven_stages,
        simulation=simulate(schedule, graph, costs=costs, latency=latency),
    )


def _node_seconds(calls: Sequence[Call], loop: int) -> dict[str, float]:
    """Mean seconds of every node in one microbatch, and of every overlapped pair.

    A node that also runs apart is judged by that: what overlaps is slower than by itself.
    """
    apart: _Runs = defaultdict(lambda: defaultdict(float))
    paired: _Runs = defaultdict(lambda: defaultdict(float))
    for number, call in enumerate(calls):
        for event in call.runs:
            if event.info.loop != loop:
                continue
            if event.info.pair:
                pair = re.sub(r"\d+(?=[|\]])", "", event.info.pair)  # without microbatches
                apart[pair][number, event.step] += event.duration
            for node, share in event.info.nodes:
                runs, which = (paired, event.step) if event.info.pair else (apart, event.microbatch)
                runs[node][number, which] += share * event.duration
    return {name: fmean(runs.values()) for name, runs in {**paired, **apart}.items()}


def _num_passes(call: Call, loop: int) -> int:
    """How often a call runs the loop, which may stand in another loop."""
    firsts = [e.label for e in call.runs if e.info.loop == loop and e.microbatch == 0]
    return min(Counter(firsts).values(), default=0)


def _span(call: Call, loop: int) -> float:
    mine = [event for event in call.runs if event.info.loop == loop]
    return max(e.end for e in mine) - min(e.start for e in mine)


def _equal(table: dict[str, float], graph: StageGraph) -> dict[str, float]:
    """The table with the mean over the stages for each kind, and over all overlapped pairs."""
    kinds = {"pairs": [name for name in table if name.startswith("[")]}
    for node in graph.nodes:
        if isinstance(node, Part):
            kinds.setdefault(node.kind, []).append(str(node))
    means = {
        name: sum(table[other] for other in names) / len(names)
        for names in kinds.values()
        for name in names
    }
    return {**table, **means}


def _with_halves(table: dict[str, float], graph: StageGraph) -> dict[str, float]:
    """Adds B and W of stages that ran BW: half each, for schedules that run them apart."""
    halves = {
        f"{node.stage}{kind}": table[str(node)] / 2
        for node in graph.nodes
        if isinstance(node, Part) and node.kind == "BW"
        for kind in ("B", "W")
    }
    return {**halves, **table}


def _latencies(calls: Sequence[Call], loop: int, graph: StageGraph) -> Latencies:
    """Mean seconds of the copies between each two nodes whose edge crosses."""
    crossing = {(str(e.source), str(e.target)) for e in graph.edges if e.crosses}
    found: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        by_step = {event.step: event for event in call.events}
        for event in call.runs:
            if event.info.loop != loop:
                continue
            for copy in (by_step[n] for n in event.info.needs if by_step[n].is_copy):
                sources = [by_step[n].info.nodes for n in copy.info.needs]
                for source in (name for nodes in sources for name, _ in nodes):
                    for target, _ in event.info.nodes:
                        if (source, target) in crossing:
                            found.setdefault((source, target), []).append(copy.duration)
    return {edge: fmean(seconds) for edge, seconds in found.items()}
