"""Schedules: the steps of a real plan through the executor's loop on a backend that sleeps.

A tiny model is cut, scheduled and planned for eight CPU devices. Its steps then run on a *sleeping
backend*: a thread for each submesh runs its queue in order and sleeps for F, B and W, copies arrive
after a latency, and a submesh with 32 programs in flight blocks the caller. What the schedule takes
there is compared with its simulated makespan: a false dependency, a bad order of dispatch or a slow
executor shows as a ratio above 1. Nothing is compiled.

Run it with `python benchmarks/schedules.py [--schedule zb-v] [--milliseconds 4]`.
"""

import argparse
import functools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_plugins.multimesh import init

init(cpus=8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from multimesh._src.ir.plan import Copy, Plan, Run  # noqa: E402
from multimesh._src.partition.pipeline import Partitioned  # noqa: E402
from multimesh._src.report.labels import JOINT, find_units  # noqa: E402
from multimesh._src.runtime.buffers import plan_buffers  # noqa: E402
from multimesh._src.runtime.executor import prepare_steps, run_steps  # noqa: E402
from multimesh.jax import MultiMesh, Task, microbatch, mjit, schedules  # noqa: E402

NUM_RANKS = 8
NUM_MICROBATCHES = 32
WIDTH = 8  # above the size up to which arrays live everywhere and what reads them is cloned
IN_FLIGHT = 32
# schedule: stages a rank, and where they lie
SCHEDULES = {
    "gpipe": (1, "loop"),
    "1f1b": (1, "loop"),
    "eager-1f1b": (1, "loop"),
    "interleaved-1f1b": (2, "loop"),
    "looped-bfs": (2, "loop"),
    "zb-h1": (1, "loop"),
    "zb-h2": (1, "loop"),
    "zb-v": (2, "v"),
    "dualpipe-v": (2, "v"),
}


# --- the backend ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Value:
    """An array that will be there; `time` holds when it was made, once `made` is set."""

    made: threading.Event = field(default_factory=threading.Event)
    time: float = 0.0

    def at(self) -> float:
        """Waits for the value and returns when it was made."""
        self.made.wait()
        return self.time


@dataclass(frozen=True, slots=True)
class Arriving:
    """A copy of a value, there a latency later."""

    source: "Value | Arriving"
    latency: float

    def at(self) -> float:
        """Waits for the source and returns when the copy arrives."""
        return self.source.at() + self.latency


class Submesh:
    """Runs what it is given in order, one at a time.

    Run times are kept by a clock of its own: an action begins when the one before has ended, its
    values are there and the caller has enqueued it, and takes exactly its time. That the thread
    wakes up a little late is so of no account.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(IN_FLIGHT)
        self.end = 0.0
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def run(self, values: Sequence[Any], results: Sequence[Value], seconds: float) -> None:
        """Enqueues an action; blocks while too many are in flight."""
        self._room.acquire()
        self._queue.put((time.perf_counter(), values, results, seconds))

    def close(self) -> None:
        """Waits for the queue to run empty."""
        self._queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            enqueued, values, results, seconds = item
            begin = max([self.end, enqueued, *(value.at() for value in values)])
            if (wait := begin + seconds - time.perf_counter()) > 0:
                time.sleep(wait)
            self.end = begin + seconds
            for result in results:
                result.time = self.end
                result.made.set()
            self._room.release()


# --- plans ----------------------------------------------------------------------------------------


def partition(schedule: str) -> Partitioned:
    """A train step of one tiny layer a stage, planned."""
    chunks, placement = SCHEDULES[schedule]
    num_layers = NUM_RANKS * chunks
    multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()), ("stage",)))

    def task(text: str, backprop: bool) -> Task:
        stage = int(text)
        rank = stage % NUM_RANKS
        if placement == "v" and stage >= NUM_RANKS:
            rank = 2 * NUM_RANKS - 1 - stage
        name = f"layer{stage}_{'bwd' if backprop else 'fwd'}"
        return Task(name=name, mesh_slice={"stage": rank}, stage=stage)

    def loss(params: Any, x: Any) -> Any:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def step(params: Any, x: Any) -> Any:
        gradient = microbatch(jax.value_and_grad(loss), 0, 1, argnum=1, schedule=schedule)
        value, grads = gradient(params, x)
        return [w - g for w, g in zip(params, grads, strict=True)], value

    multi_mesh.register_task(r"layer(\d+)", callback=task)
    with multi_mesh:
        params = [jnp.ones((WIDTH, WIDTH))] * num_layers
        lowered = mjit(step).lower(params, jnp.ones((NUM_MICROBATCHES, WIDTH)))
    return lowered._partitioned


def seconds_of(plan: Plan, partitioned: Partitioned, seconds: dict[str, float]) -> list[float]:
    """How long each step of the plan takes; what is outside the loop takes no time."""
    (simulation,) = partitioned.schedules.values()
    units = find_units(partitioned.program.tasks, plan)
    costs = {**seconds, "BW": seconds["B"] + seconds["W"]}

    def cost(number: int, step: Any) -> float:
        if not isinstance(step, Run) or step.iteration < 0:
            return 0.0
        parts = units.units[units.unit_of[number]].tasks
        event = simulation.order[step.group][1] if step.group >= 0 else None
        if JOINT in step.task and isinstance(event, schedules.Pair):
            return costs[event.first.kind] + costs[event.second.kind]
        return sum(costs[part.kind] for part in parts)

    return [cost(number, step) for number, step in enumerate(plan.steps)]


def prepare_run(partitioned: Partitioned, seconds: dict[str, float], latency: float) -> Callable:
    """Returns a function that runs the plan once and returns how long its loop took."""
    buffered = plan_buffers(partitioned.plan)
    plan = buffered.plan
    times = seconds_of(plan, partitioned, seconds)

    def run() -> float:
        submeshes = [Submesh() for _ in partitioned.program.submeshes]
        calls = [
            functools.partial(_copy, step, latency)
            if isinstance(step, Copy)
            else functools.partial(
                _run, submeshes[plan.executables[step.executable].submesh.index], step, duration
            )
            for step, duration in zip(plan.steps, times, strict=True)
        ]
        steps = prepare_steps(buffered, calls, [None] * len(calls))
        begin = time.perf_counter()
        there = Value(time=begin)
        there.made.set()
        run_steps(steps, [there] * len(plan.slots))
        for submesh in submeshes:
            submesh.close()
        return max(submesh.end for submesh in submeshes) - begin

    return run


def _copy(step: Copy, latency: float, values: Sequence[Any]) -> list[Arriving]:
    return [Arriving(value, latency) for value in values]


def _run(submesh: Submesh, step: Run, seconds: float, values: Sequence[Any]) -> list[Value]:
    results = [Value() for _ in step.outputs]
    submesh.run(values, results, seconds)
    return results


# --- the table ------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="default: all")
    parser.add_argument("--milliseconds", type=float, default=4.0, help="of F, B and W each")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    unit = options.milliseconds / 1e3
    title = f"{NUM_RANKS} ranks, {NUM_MICROBATCHES} microbatches, F = B = W = {unit * 1e3:g} ms"
    table = Table(title=title, box=box.SIMPLE)
    for column in ("schedule", "latency", "simulated ms", "min ms", "med. ms", "min / sim."):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name in options.schedule or SCHEDULES:
        partitioned = partition(name)
        (simulation,) = partitioned.schedules.values()
        seconds = dict.fromkeys("FBW", unit)
        for latency in (0.0, unit / 2):
            found = schedules.simulate(
                simulation.schedule, simulation.graph, costs=seconds, latency=latency
            )
            run = prepare_run(partitioned, seconds, latency)
            rounds = [run() for _ in range(options.rounds)]
            table.add_row(
                name,
                f"{latency / unit:g} F",
                f"{found.makespan * 1e3:.0f}",
                f"{min(rounds) * 1e3:.0f}",
                f"{statistics.median(rounds) * 1e3:.0f}",
                f"{min(rounds) / found.makespan:.3f}",
            )
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
