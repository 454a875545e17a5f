"""How benchmarks measure: what is compared runs in turn in one process, many rounds.

Machines are shared and noisy. Turns put the same noise on everything compared, the minimum is what
the code can do, the median what it does, and CPU seconds show what other processes cannot disturb.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

MIN_ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call in every round."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]  # all threads of this process

    @property
    def min_wall(self) -> float:
        """The fastest round."""
        return min(self.wall)

    @property
    def median_wall(self) -> float:
        """The middle round."""
        return statistics.median(self.wall)


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    num_rounds: int = 25,
    calls_per_round: int = 4,
) -> dict[str, Timing]:
    """Runs every candidate in every round, each to its end, and returns their times per call.

    Args:
        candidates: Name to function; what it returns is waited for.
        num_rounds: At least `MIN_ROUNDS`.
        calls_per_round: Calls between two looks at the clock.
    """
    if num_rounds < MIN_ROUNDS:
        raise ValueError(f"`num_rounds` is {num_rounds}, less than {MIN_ROUNDS}.")
    for run in candidates.values():
        jax.block_until_ready(run())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for index in range(num_rounds):
            names = list(candidates)
            start = index % len(names)  # nobody always follows the same neighbour
            for name in names[start:] + names[:start]:
                times[name].append(_timed(candidates[name], calls_per_round))
    finally:
        gc.enable()
    return {
        name: Timing(tuple(wall for wall, _ in pairs), tuple(cpu for _, cpu in pairs))
        for name, pairs in times.items()
    }


def _timed(run: Callable[[], Any], num_calls: int) -> tuple[float, float]:
    result = None
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_calls):
        result = run()
    jax.block_until_ready(result)
    return (
        (time.perf_counter() - wall) / num_calls,
        (time.process_time() - cpu) / num_calls,
    )


def paired_ratio(timing: Timing, base: Timing) -> float:
    """The median over the rounds of the ratio of two wall times, taken in the same round."""
    return statistics.median(a / b for a, b in zip(timing.wall, base.wall, strict=True))


def print_table(title: str, rows: Mapping[str, Mapping[str, Timing]], base: str) -> None:
    """Prints one line per case and candidate; ratios are to the candidate `base`.

    The last one is the median of the ratios of each round.
    """
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("case", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for column in ("min ms", "med. ms", "CPU ms", "of min", "of med.", "paired"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, timings in rows.items():
        floor = timings[base]
        for number, (name, timing) in enumerate(timings.items()):
            table.add_row(
                "" if number else case,
                name,
                f"{timing.min_wall * 1e3:.2f}",
                f"{timing.median_wall * 1e3:.2f}",
                f"{statistics.median(timing.cpu) * 1e3:.2f}",
                f"{timing.min_wall / floor.min_wall:.3f}",
                f"{timing.median_wall / floor.median_wall:.3f}",
                f"{paired_ratio(timing, floor):.3f}",
            )
        table.add_section()
    Console(width=100).print(table)
