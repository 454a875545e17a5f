"""`auto`: simulates the built-in schedules and takes the shortest that fits in memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multimesh._src.errors import ScheduleError, message
from multimesh._src.schedule.before import Before
from multimesh._src.schedule.built_in import BUILT_IN, default_rule
from multimesh._src.schedule.costs import (
    NO_MEMORY,
    UNIT,
    Costs,
    Latency,
    Memory,
    check_latency,
    costs_of,
)
from multimesh._src.schedule.rule import Request, Rule
from multimesh._src.schedule.schedule import Schedule
from multimesh._src.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Choice:
    """What `auto` chose and why.

    Attributes:
        schedule: The chosen schedule.
        simulation: Its simulation.
        reasons: One line on the choice, then one on each candidate.
    """

    schedule: Schedule
    simulation: Simulation
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Auto:
    """A rule that picks a built-in schedule.

    Attributes:
        costs: Run times, estimated or measured.
        latency: Latency of transfers, in the unit of the costs.
        memory: Bytes of a residual set; without it every schedule fits.
        limit: Bytes that a rank may hold.
    """

    costs: Costs = field(default_factory=Costs)
    latency: Latency = 0.0
    memory: Memory = field(default_factory=Memory)
    limit: float = math.inf

    def __hash__(self) -> int:
        latency = self.latency
        if isinstance(latency, Mapping):
            latency = hash(frozenset(latency.items()))
        return hash((self.costs, latency, self.memory, self.limit))

    def reasons(
        self, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1
    ) -> tuple[str, ...]:
        """What would be chosen for this size, in one line, then one line on each candidate.

        Raises:
            ScheduleError: No built-in schedule does what is asked within the limit.
        """
        return self.choose(Request(num_ranks, num_microbatches, num_chunks)).reasons

    def make(self, request: Request) -> Schedule:
        """The chosen schedule.

        Raises:
            ScheduleError: No built-in schedule does what is asked within the limit.
        """
        return self.choose(request).schedule

    def choose(self, request: Request) -> Choice:
        """The chosen schedule with the reasons.

        Of schedules that are equally long, the one with the smaller peak wins, then the one that
        stands first among the built-ins; so every process chooses the same.

        Raises:
            ScheduleError: No built-in schedule does what is asked within the limit.
        """
        if not request.placement and not request.num_chunks:
            request = replace(request, num_chunks=1)  # schedules of other sizes do not compare
        reasons: list[str] = []
        fitting: list[Simulation] = []
        default = default_rule(request)
        for rule in _candidates(request, default):
            simulation, reason = self._tried(rule, request)
            reasons.append(f"`{rule.name}`: {reason}")
            if simulation is not None:
                fitting.append(simulation)
        if not fitting:
            self._simulated(default, request)  # where that one cannot run, its error says why
            what = "No built-in schedule does what is asked:\n" + "\n".join(reasons)
            ways = ["allow more memory", "change the number of microbatches or stages a rank"]
            raise ScheduleError(message(what, ways=ways))
        best = min(fitting, key=_badness)
        why = "the shortest" + ("" if math.isinf(self.limit) else " that fits")
        chosen = f"`auto` chose `{best.schedule.name}`: {why} of `{len(reasons)}` candidates."
        return Choice(best.schedule, best, (chosen, *reasons))

    def _tried(self, rule: Rule | Before, request: Request) -> tuple[Simulation | None, str]:
        try:
            simulation = self._simulated(rule, request)
        except ScheduleError as error:
            return None, f"not possible. {str(error).splitlines()[0]}"
        peaks = simulation.peaks
        most = max(peaks.num_bytes)
        told = (
            f"makespan `{simulation.makespan:g}`, bubble `{simulation.bubble_share:.1%}`, "
            f"at most `{max(peaks.until_b)}` sets until B and `{max(peaks.until_w)}` until W, "
            f"`{most:g}` bytes"
        )
        if most > self.limit:
            rank = peaks.num_bytes.index(most)
            return None, f"{told}; does not fit: rank `{rank}` may hold `{self.limit:g}` bytes."
        return simulation, f"{told}."

    def _simulated(self, rule: Rule | Before, request: Request) -> Simulation:
        graph = request.graphs[0] if request.graphs else None
        return simulate(
            rule.make(request), graph, costs=self.costs, latency=self.latency, memory=self.memory
        )


def _candidates(request: Request, default: Rule | Before) -> tuple[Rule | Before, ...]:
    """The built-in schedules and, where it is none of them, the default."""
    one_stage = request.shape.num_chunks == 1
    # With one stage a rank those for any number of stages are 1f1b and gpipe.
    built_in = tuple(rule for rule in BUILT_IN if not (one_stage and rule.chunks == "any"))
    return built_in if default in BUILT_IN else (*built_in, default)


def _badness(simulation: Simulation) -> tuple[float, float, int]:
    # Sums of the same costs in another order differ in the last digits.
    makespan = float(f"{simulation.makespan:.9e}")
    return makespan, max(simulation.peaks.num_bytes), max(simulation.peaks.until_w)


def auto(
    *,
    costs: Costs | Mapping[str, float] = UNIT,
    latency: Latency = 0.0,
    memory: Memory = NO_MEMORY,
    limit: float = math.inf,
) -> Auto:
    """A rule that simulates the built-in schedules and takes the shortest that fits.

    Args:
        costs: Run time per kind, node or pair (see `Costs`); unit cost by default.
        latency: Time that a transfer takes, in the unit of the costs.
        memory: Bytes of a residual set (see `Memory`).
        limit: Bytes that a rank may hold.

    Returns:
        A rule, to be given as `schedule=` or to `make_schedule`; its `reasons` tells what it
        would choose and why.

    Raises:
        ScheduleError: A cost or latency is negative.

    >>> auto(latency=0.1).reasons(num_ranks=4, num_microbatches=8)[0]
    '`auto` chose `zb-h2`: the shortest of `7` candidates.'
    """
    check_latency(latency)
    return Auto(costs_of(costs), latency, memory, limit)
