"""Planning: every built-in schedule made, checked and simulated at a size without devices.

64 ranks, 1024 microbatches, four stages a rank (two in the V placement, one where the schedule has
one): half a million actions and more. Nothing of JAX is imported.

Run it with `python benchmarks/planning.py [--ranks 64] [--microbatches 1024]`.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from multimesh._src.schedule.built_in import BUILT_IN
from multimesh._src.schedule.check import check
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.simulate import simulate

TARGET = 15.0  # seconds, all together
CHUNKS = {"any": 4, "v": 2}


def timed(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """What a function returns, and the CPU seconds that it took."""
    begin = time.process_time()
    found = function(*args, **options)
    return found, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1024)
    options = parser.parse_args()
    title = f"{options.ranks} ranks, {options.microbatches} microbatches, CPU seconds"
    table = Table(title=title, box=box.SIMPLE)
    for column in ("schedule", "stages a rank", "actions", "make", "check", "simulate", "makespan"):
        justify = "left" if column == "schedule" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    total = 0.0
    for rule in BUILT_IN:
        chunks = CHUNKS.get(rule.chunks, 1)
        made, making = timed(
            make_schedule,
            rule.name,
            num_ranks=options.ranks,
            num_microbatches=options.microbatches,
            num_chunks=chunks,
        )
        _, checking = timed(check, made)
        found, simulating = timed(simulate, made)
        total += making + checking + simulating
        times = (f"{seconds:.2f}" for seconds in (making, checking, simulating))
        actions = f"{len(found.order):,}"
        table.add_row(rule.name, str(chunks), actions, *times, f"{found.makespan:g}")
    console = Console()
    console.print(table)
    console.print(f"all together {total:.1f} s, wanted: at most {TARGET:g} s")


if __name__ == "__main__":
    main()
