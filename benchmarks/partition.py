"""Partition: what cutting a program costs, against JAX's own tracing and lowering of it.

A train step of a GPT (gradients of 16 microbatches, an sgd update) on four stages of one device or
of four, at growing numbers of layers. *jax* is `jax.jit(step).trace(...).lower()` of the same
function with its microbatches in a scan. *Ours* is everything from the end of the trace to the
first compile of XLA: the passes, Shardy's run included, and the lowering of the distinct tasks.

A second table splits the passes; a third counts traces, lowerings and compiles at other numbers of
microbatches and of equal layers. All times are CPU seconds of this process, the least of all
rounds, and microseconds an equation of the traced program.

Run it with `python benchmarks/partition.py [--equations 1000 --equations 10000] [--rounds 3]`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from jax_plugins.multimesh import init

init(cpus=16)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _models import GPT  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from multimesh._src.jax_compat.jaxprs import all_eqns  # noqa: E402
from multimesh._src.partition import pipeline  # noqa: E402
from multimesh._src.runtime import compile as compile_lib, counters  # noqa: E402
from multimesh._src.runtime.buffers import plan_buffers  # noqa: E402
from multimesh.jax import MultiMesh, microbatch, mjit  # noqa: E402

NUM_STAGES = 4
NUM_MICROBATCHES = 16
SIZE = 2  # rows of a microbatch
WIDTH = 8
EQUATIONS_A_LAYER = 265  # of the traced program
LARGEST_PASSES = 10


# --- programs -------------------------------------------------------------------------------------


def update(params: Any, grads: Any) -> Any:
    """Plain sgd."""
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def pipelined_step(params: Any, batch: Any) -> Any:
    """The train step that we pipeline."""
    gradient = microbatch(jax.value_and_grad(GPT.loss), 0, SIZE, argnum=1, schedule="1f1b")
    loss, grads = gradient(params, batch)
    return update(params, grads), loss


def plain_step(params: Any, batch: Any) -> Any:
    """The same for plain JAX: gradients accumulated in a scan."""

    def accumulate(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(GPT.loss)(params, x)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    xs = batch.reshape(-1, SIZE, *batch.shape[1:])
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, xs)
    return update(params, grads), loss


def make_multi_mesh(num_layers: int, sizes: tuple[int, int]) -> MultiMesh:
    """Four stages of (data, model) devices, the layers evenly over them."""
    shape = (NUM_STAGES, *sizes)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data", "model")))
    multi_mesh.register_layers(r"layer\d+", num_layers=num_layers, axis="stage")
    return multi_mesh


def arguments(num_layers: int, num_microbatches: int = NUM_MICROBATCHES) -> tuple[Any, Any]:
    """Parameters and a batch, on the host."""
    return GPT.params(num_layers, WIDTH), GPT.batch(num_microbatches * SIZE, WIDTH)


# --- times ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one round."""

    equations: int
    jax: float
    passes: float  # all of partitioning
    shardy: float  # of which propagating layouts
    lowering: float  # frees, donations and the lowering of the distinct tasks
    by_pass: Mapping[str, float]

    @property
    def ours(self) -> float:
        """All between the trace and XLA."""
        return self.passes + self.lowering


def cost(num_layers: int, sizes: tuple[int, int]) -> Cost:
    """One round."""
    args = arguments(num_layers)
    jax.clear_caches()
    begin = time.process_time()
    jax.jit(plain_step).trace(*args).lower()
    jax_seconds = time.process_time() - begin
    with make_multi_mesh(num_layers, sizes):
        step = mjit(pipelined_step)
    traced = step.trace(*args)
    with timed_passes() as by_pass:
        begin = time.process_time()
        lowered = traced.lower()
        passes = time.process_time() - begin
    begin = time.process_time()
    lower_tasks(lowered._partitioned.plan)
    lowering = time.process_time() - begin
    equations = sum(1 for _ in all_eqns(traced.jaxpr))
    shardy = by_pass.pop("propagate_layouts")
    return Cost(equations, jax_seconds, passes, shardy, lowering, by_pass)


def lower_tasks(plan: Any) -> None:
    """What comes between partitioning and XLA."""
    with compile_lib.paused_collector(), compile_lib.no_ambient_mesh():
        programs = compile_lib._programs(plan_buffers(plan))
        distinct = {program.key(): program for program in programs if program is not None}
        for program in distinct.values():
            compile_lib._lower(program)


@contextmanager
def timed_passes() -> Iterator[dict[str, float]]:
    """Adds up the CPU seconds of every pass that `pipeline` calls; passes call no other pass."""
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - begin
            return result

        return run

    passes = {
        name: function
        for name, function in vars(pipeline).items()
        if isinstance(function, FunctionType)
        and function.__module__.startswith("multimesh._src.partition.")
        and function.__module__ != pipeline.__name__
    }
    split = pipeline.Splitter.split
    try:
        for name, function in passes.items():
            setattr(pipeline, name, timed(name, function))
        pipeline.Splitter.split = timed("split", split)
        yield seconds
    finally:
        for name, function in passes.items():
            setattr(pipeline, name, function)
        pipeline.Splitter.split = split


# --- tables ---------------------------------------------------------------------------------------


def print_costs(costs: Mapping[tuple[int, str], list[Cost]], console: Console) -> None:
    """The least of all rounds by number of equations and submesh."""
    table = Table(title="from trace to XLA, CPU microseconds an equation", box=box.SIMPLE)
    for column in ("equations", "submesh", "jax", "passes", "Shardy", "lowering", "ours/jax"):
        table.add_column(column, justify="right", no_wrap=True)
    for (_, submesh), rounds in costs.items():
        number = rounds[0].equations
        least = (
            min(cost.jax for cost in rounds),
            min(cost.passes - cost.shardy for cost in rounds),
            min(cost.shardy for cost in rounds),
            min(cost.lowering for cost in rounds),
        )
        cells = (f"{seconds / number * 1e6:.0f}" for seconds in least)
        ratio = statistics.median(cost.ours / cost.jax for cost in rounds)
        table.add_row(f"{number:,}", submesh, *cells, f"{ratio:.2f}")
    console.print(table)


def print_passes(costs: Mapping[tuple[int, str], list[Cost]], console: Console) -> None:
    """The largest passes, us an equation."""
    sizes = {case: rounds for case, rounds in costs.items() if case[1] == "1x1"}
    largest = max(sizes)
    names = sorted(sizes[largest][0].by_pass, key=sizes[largest][0].by_pass.get, reverse=True)
    table = Table(title="passes, us an equation", box=box.SIMPLE)
    table.add_column("pass", no_wrap=True)
    for rounds in sizes.values():
        table.add_column(f"{rounds[0].equations:,}", justify="right")
    for name in names[:LARGEST_PASSES]:
        least = (
            min(cost.by_pass.get(name, 0.0) / cost.equations for cost in rounds) * 1e6
            for rounds in sizes.values()
        )
        table.add_row(name, *(f"{each:.1f}" for each in least))
    console.print(table)


def print_counts(console: Console) -> None:
    """What one first call traces, lowers and compiles."""
    table = Table(title="work of the first call", box=box.SIMPLE)
    for column in ("microbatches", "layers", "traces", "lowerings", "compiles"):
        table.add_column(column, justify="right")
    for num_microbatches, num_layers in ((8, 12), (16, 12), (8, 24)):
        with make_multi_mesh(num_layers, (1, 1)):
            step = mjit(pipelined_step)
        before = counters.snapshot()
        step(*arguments(num_layers, num_microbatches))
        grown = counters.since(before)
        counts = (num_microbatches, num_layers, grown.traces, grown.lowerings, grown.compiles)
        table.add_row(*map(str, counts))
    console.print(table)


def main() -> None:
    """Measures all sizes and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--equations", type=int, action="append", help="about; may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    console = Console()
    costs: dict[tuple[int, str], list[Cost]] = {}
    for equations in args.equations or (1_000, 10_000):
        num_layers = NUM_STAGES * max(1, round(equations / EQUATIONS_A_LAYER / NUM_STAGES))
        for sizes in ((1, 1), (2, 2)):
            case = (equations, f"{sizes[0]}x{sizes[1]}")
            costs[case] = [cost(num_layers, sizes) for _ in range(args.rounds)]
    print_costs(costs, console)
    print_passes(costs, console)
    print_counts(console)


if __name__ == "__main__":
    main()
