"""Dispatch: a step whose tasks do almost nothing, against the floor of the runtime.

Four stages of one 8x8 tanh layer each, 16 microbatches, gradients and an sgd update, on submeshes
of 1, 2 and 4 devices. The *floor* is a replay of the same executables and copies from a flat list:
no arguments to look at, no trees, no error handling. It drops what is dead, as the step does:
holding it would cost more than dropping it.

Run it with `python benchmarks/dispatch.py [--rounds 25] [--schedule 1f1b]`.
"""

import argparse
from collections import Counter
from typing import Any

from jax_plugins.multimesh import init

init(cpus=16)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _measure import measure, print_table  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from multimesh._src.frontend.batches import prepare_batch  # noqa: E402
from multimesh._src.ir.plan import Run  # noqa: E402
from multimesh.jax import MultiMesh, microbatch, mjit  # noqa: E402

NUM_STAGES = 4
NUM_MICROBATCHES = 16
MICROBATCH_SIZE = 8
WIDTH = 8
SUBMESHES = ((1, 1), (2, 1), (2, 2))  # data, model


class Replay:
    """The floor: calls the executables and copies of a compiled plan, slot by slot."""

    def __init__(self, plan: Any, arguments: list[Any]):
        self._slots = plan._template.copy()
        plan._inputs.load(arguments, self._slots)
        self._steps = [step[:4] for step in plan._steps]
        self._outputs = plan.buffered.plan.outputs

    def __call__(self) -> list[Any]:
        """Runs the whole step once on the arguments that it was made with."""
        slots = self._slots.copy()
        for call, fetch, targets, frees in self._steps:
            for slot, result in zip(targets, call(fetch(slots)), strict=True):
                slots[slot] = result
            for slot in frees:
                slots[slot] = None
        return [slots[slot] for slot in self._outputs]


def model(params, x):
    """x [batch, WIDTH] through one tanh layer a stage."""
    for stage, w in enumerate(params):
        with jax.named_scope(f"layer{stage}"):
            x = jnp.tanh(x @ w)
    return x


def loss_fn(params, x):
    """Mean square of the last activations."""
    return jnp.square(model(params, x)).mean()


def make_step(schedule):
    """A function (params, batch) -> (params, loss)."""

    def step(params, batch):
        grad_fn = microbatch(
            jax.value_and_grad(loss_fn), 0, MICROBATCH_SIZE, argnum=1, schedule=schedule
        )
        loss, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    return step


def prepare(sizes, schedule):
    """Returns the step on submeshes of `sizes`, its floor, and a line about its plan."""
    shape = (NUM_STAGES, *sizes)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data", "model")))
    multi_mesh.register_layers(r"layer\d+", num_layers=NUM_STAGES, axis="stage")
    with multi_mesh:
        step = mjit(make_step(schedule))
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(NUM_STAGES)]
    batch = draw.standard_normal((NUM_MICROBATCHES * MICROBATCH_SIZE, WIDTH), np.float32)

    compiled = step.trace(params, batch).lower().compile()
    (params_at, batch_at), _ = compiled.input_shardings
    params = jax.device_put(params, params_at)
    batch = prepare_batch(batch, 0, MICROBATCH_SIZE, sharding=batch_at)
    plan = compiled.backend.compiled
    floor = Replay(plan, jax.tree.leaves((params, batch)))
    kinds = Counter(type(s) is Run for s in plan.buffered.plan.steps)
    return lambda: step(params, batch), floor, f"{kinds[True]} tasks, {kinds[False]} copies"


def main() -> None:
    """Measures all submeshes and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    rows, steps = {}, ""
    for sizes in SUBMESHES:
        step, floor, steps = prepare(sizes, args.schedule)
        case = f"{sizes[0]}x{sizes[1]}"
        rows[case] = measure({"floor": floor, "step": step}, num_rounds=args.rounds)
    title = (
        f"dispatch, {NUM_STAGES} stages x {NUM_MICROBATCHES} microbatches by data x model: {steps}"
    )
    print_table(title, rows, "floor")


if __name__ == "__main__":
    main()
