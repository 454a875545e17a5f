"""Random programs against plain `jax.jit`: the command behind `make fuzz`.

    python -m tests.programs.fuzz --num-programs 500 --start 0
    python -m tests.programs.fuzz --spec "Spec(layers=(Layer(ops=('matmul',)),), ...)"

Program number `i` is always the same program. A program that fails is made simpler as long as it
still fails in the same way, and is printed as code that `--spec` takes. XLA's optimisations are
off, for ours and for the references alike: they take a third of the time and are not what is tested
here. Without them plain JAX itself can give a NaN (the gradient of `max` divides by the number of
elements that equal it, computed twice), so a result that is off is judged once more with them on.
`--optimized` leaves them on.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from jax_plugins.multimesh import init

init(cpus=8)

import jax  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress, TextColumn  # noqa: E402

from tests.oracle import IllConditionedError  # noqa: E402
from tests.programs.compare import Outcome, check_program, run_ours  # noqa: E402
from tests.programs.generator import make_batches  # noqa: E402
from tests.programs.seeded import Seeded  # noqa: E402
from tests.programs.spec import Layer, Spec, draw_spec, simpler  # noqa: E402

SHRINK_S = 90  # seconds spent on making one failure simpler
PRINT_EVERY = 10  # programs, where there is no progress bar
CLEAR_EVERY = 20  # programs; compiled programs are kept by JAX until then


def failure_of(spec: Spec, run: Callable[[Spec], Any]) -> Exception | None:
    """Runs `spec` and returns what went wrong, or None."""
    try:
        run(spec)
    except IllConditionedError:
        return None
    except Exception as error:
        return error
    return None


def check_twice(spec: Spec) -> Outcome:
    """Checks `spec`, once more with XLA's optimisations if they were off and a result is."""
    try:
        return check_program(spec)
    except AssertionError:
        if not jax.config.read("jax_disable_most_optimizations"):
            raise
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        return check_program(spec)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def shrunk(spec: Spec, error: Exception) -> tuple[Spec, Exception]:
    """Returns the simplest program found that fails like `spec` did."""
    # What is no wrong result needs no references to show up.
    run = check_twice if isinstance(error, AssertionError) else run_alone
    end = time.monotonic() + SHRINK_S
    options = simpler(spec)
    while time.monotonic() < end and (option := next(options, None)) is not None:
        found = failure_of(option, run)
        if found is not None and _kind(found) == _kind(error):
            spec, error, options = option, found, simpler(option)
    return spec, error


def run_alone(spec: Spec) -> None:
    """Runs `spec` without references."""
    run_ours(spec, make_batches(spec)[: spec.num_steps])


def _kind(error: Exception) -> tuple[type, str]:
    """What two failures must share to count as the same: the type and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), f"{last.filename}:{last.name}"


def report(console: Console, title: str, spec: Spec, error: Exception) -> None:
    """Prints one failure."""
    console.print(f"\n{title}: {type(error).__name__}", style="bold red", markup=False)
    console.print(str(error)[:2000], markup=False, highlight=False)
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    console.print("".join(traceback.format_list(frames)), markup=False, highlight=False)
    print(repr(spec))  # unwrapped, to be copied


def run_programs(console: Console, num_programs: int, start: int, keep_going: int) -> bool:
    """Runs the programs `start..start+num_programs-1`; True if all passed."""
    counts: Counter[str] = Counter()
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("programs", total=num_programs, state="")
        for seed in range(start, start + num_programs):
            spec = draw_spec(Seeded(seed))
            _run_one(console, seed, spec, counts)
            if (seed + 1) % CLEAR_EVERY == 0:
                jax.clear_caches()
            progress.update(bar, advance=1, state=_summary(counts))
            if not console.is_terminal and (seed + 1 - start) % PRINT_EVERY == 0:
                print(f"{seed + 1 - start} programs: {_summary(counts)}", flush=True)
            if counts["failed"] >= keep_going:
                console.print(f"stopped after {counts['failed']} failures")
                break
    console.print(_summary(counts))
    # The line that test runners and CI read.
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['ill']} skipped")
    return counts["failed"] == 0


def _run_one(console: Console, seed: int, spec: Spec, counts: Counter[str]) -> None:
    try:
        outcome = check_twice(spec)
    except IllConditionedError:
        counts["ill"] += 1
        return
    except Exception as error:
        counts["failed"] += 1
        report(console, f"program {seed}, as drawn", spec, error)
        report(console, f"program {seed}, made simpler", *shrunk(spec, error))
        return
    counts["passed"] += 1
    kind = "one device" if outcome.one_device else "more devices"
    counts[f"arrays, {kind}"] += outcome.num_arrays
    counts[f"bitwise, {kind}"] += outcome.num_bitwise


def _summary(counts: Counter[str]) -> str:
    parts = [
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['ill']} ill-conditioned"
    ]
    for kind in ("one device", "more devices"):
        same, total = counts[f"bitwise, {kind}"], counts[f"arrays, {kind}"]
        if total:
            parts.append(f"bitwise equal on {kind}: {same}/{total} arrays")
    return "; ".join(parts)


def main() -> int:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-programs", type=int, default=500)
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--keep-going", type=int, default=10, help="failures before it stops")
    parser.add_argument("--optimized", action="store_true", help="leave XLA's optimisations on")
    parser.add_argument("--spec", help="runs this one program, as printed for a failure")
    args = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", not args.optimized)
    console = Console()
    if args.spec:
        spec = eval(args.spec, {"Spec": Spec, "Layer": Layer})
        print(check_program(spec))
        return 0
    return 0 if run_programs(console, args.num_programs, args.start, args.keep_going) else 1


if __name__ == "__main__":
    sys.exit(main())
