"""Dispatch: a step whose tasks do almost nothing, against the floor of the runtime.

Two models of tiny width on four stages, 16 microbatches, gradients and an sgd update, on submeshes
of 1, 2 and 4 devices:

- `mlp`: one 8x8 tanh layer a stage, so few buffers a task;
- `gpt`: five blocks of a GPT a stage in one task: 60 parameters, and all residuals between forward
  and backward.

The *floor* is a replay of the same executables and copies from a flat list: no arguments to look
at, no trees, no error handling. It drops what is dead, as the step does: holding it would cost more
than dropping it.

Run it with `python benchmarks/dispatch.py [--model mlp|gpt|all] [--rounds 25] [--schedule 1f1b]`.
"""

import argparse
from collections import Counter
from typing import Any

from jax_plugins.multimesh import init

init(cpus=16)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from _measure import measure, print_table  # noqa: E402
from _models import GPT, MLP, Model  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from multimesh._src.frontend.batches import prepare_batch  # noqa: E402
from multimesh._src.ir.plan import Run  # noqa: E402
from multimesh.jax import MultiMesh, Task, microbatch, mjit  # noqa: E402

NUM_STAGES = 4
NUM_MICROBATCHES = 16
WIDTH = 8
MODELS = {"mlp": MLP, "gpt": GPT}
LAYERS_A_STAGE = {"mlp": 1, "gpt": 5}
MICROBATCH_SIZE = {"mlp": 8, "gpt": 2}
SUBMESHES = ((1, 1), (2, 1), (2, 2))  # data, model


class Replay:
    """The floor: calls the executables and copies of a compiled plan, slot by slot."""

    def __init__(self, plan: Any, arguments: list[Any]):
        self._slots = plan._prepared.new_slots()
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


def make_step(model: Model, size: int, schedule: str) -> Any:
    """A function (params, batch) -> (params, loss)."""

    def step(params, batch):
        grad_fn = microbatch(jax.value_and_grad(model.loss), 0, size, argnum=1, schedule=schedule)
        loss, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    return step


def one_task_a_stage(multi_mesh: MultiMesh, layers_a_stage: int) -> None:
    """Registers the layers so that all of a stage are one task forward and one backward."""

    def task(text: str, backprop: bool) -> Task:
        stage = int(text) // layers_a_stage
        suffix = "bwd" if backprop else "fwd"
        return Task(name=f"stage{stage}_{suffix}", mesh_slice={"stage": stage}, stage=stage)

    multi_mesh.register_task(r"layer(\d+)", callback=task)


def prepare(name: str, sizes: tuple[int, int], schedule: str) -> tuple[Any, Replay, str]:
    """Returns the step on submeshes of `sizes`, its floor, and a line about its plan."""
    model, layers, size = MODELS[name], LAYERS_A_STAGE[name], MICROBATCH_SIZE[name]
    shape = (NUM_STAGES, *sizes)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data", "model")))
    one_task_a_stage(multi_mesh, layers)
    with multi_mesh:
        step = mjit(make_step(model, size, schedule))
    params = model.params(NUM_STAGES * layers, WIDTH)
    batch = model.batch(NUM_MICROBATCHES * size, WIDTH)

    compiled = step.trace(params, batch).lower().compile()
    (params_at, batch_at), _ = compiled.input_shardings
    params = jax.device_put(params, params_at)
    batch = prepare_batch(batch, 0, size, sharding=batch_at)
    plan = compiled.backend.compiled
    floor = Replay(plan, jax.tree.leaves((params, batch)))
    return lambda: step(params, batch), floor, describe(plan.buffered.plan)


def describe(plan: Any) -> str:
    """Counts the steps of a plan, and the buffers of its tasks."""
    kinds = Counter(type(step) is Run for step in plan.steps)
    runs = [step for step in plan.steps if type(step) is Run]
    largest = max(runs, key=lambda run: len(run.inputs) + len(run.outputs))
    buffers = f"up to {len(largest.inputs)} buffers in and {len(largest.outputs)} out"
    return f"{kinds[True]} tasks ({buffers}), {kinds[False]} copies"


def main() -> None:
    """Measures all submeshes and prints one table a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=(*MODELS, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    for name in MODELS if args.model == "all" else (args.model,):
        rows, steps = {}, ""
        for sizes in SUBMESHES:
            step, floor, steps = prepare(name, sizes, args.schedule)
            case = f"{sizes[0]}x{sizes[1]}"
            rows[case] = measure({"floor": floor, "step": step}, num_rounds=args.rounds)
        title = f"{name}, {NUM_STAGES} stages x {NUM_MICROBATCHES} microbatches: {steps}"
        print_table(title, rows, "floor")


if __name__ == "__main__":
    main()
