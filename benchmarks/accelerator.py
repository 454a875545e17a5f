"""One accelerator: the GPT of `examples/train_gpt.py` in twelve tasks, against plain `jax.jit`.

All tasks lie on one submesh of one device, so nothing is moved and nothing is gained: what is
measured is what cutting a step costs where the device is busy. Both sides train on the same batches
with the same microbatch loop, adamw and clipping, in bfloat16 with parameters and sums in float32.

- `plain`: `jax.jit` of the train step, its state donated;
- `ours`: `mjit` of the same function, schedule 1f1b;
- `ours, never fused`: the same with one program for each task.

Run it with `python benchmarks/accelerator.py [--layers 12] [--width 2048] [--rows 4]`; it takes the
first device that JAX finds. `--only plain` runs one of them alone and prints the peak of memory.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import measure, paired_ratio, print_table
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh.jax import MultiMesh, enable_task_fusion, microbatch, mjit, prepare_batch

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from _gpt import Config, Text, init_params, loss_fn

NUM_MICROBATCHES = 8

State = Any


def make_train_step(config: Config, size: int) -> Callable[[State, Any], Any]:
    """A function (state, text) -> (state, loss); microbatches of `size` rows."""
    optimizer = make_optimizer()

    def train_step(state: State, text: Any) -> Any:
        gradient = jax.value_and_grad(lambda params, text: loss_fn(config, params, text))
        pipelined = microbatch(gradient, 0, size, argnum=1, schedule="1f1b", reduce="mean")
        params, opt_state = state
        loss, grads = pipelined(params, text)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def make_optimizer() -> optax.GradientTransformation:
    """Clipping and adamw."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def make_multi_mesh(mesh: Mesh, config: Config) -> MultiMesh:
    """Every block a task, all on the one device."""
    multi_mesh = MultiMesh(global_mesh=mesh)
    multi_mesh.register_layers(r"block_\d+", num_layers=config.num_layers, axis="stage")
    return multi_mesh


class Trainer:
    """A compiled train step with a state of its own.

    Args:
        name: One of `NAMES`.
        config: The model.
        batches: Texts int[rows, context + 1]; they are taken in turn.
    """

    NAMES = ("plain", "ours", "ours, never fused")

    def __init__(self, name: str, config: Config, batches: list[np.ndarray]):
        self.losses: list[Any] = []
        self.config = config
        size = len(batches[0]) // NUM_MICROBATCHES
        train_step = make_train_step(config, size)
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("stage", "data", "model"))
        with jax.set_mesh(mesh):
            self.state = jax.jit(self.init_state)()
        began = time.perf_counter()
        if name == "plain":
            self.program = None
            with jax.set_mesh(mesh):
                lowered = jax.jit(train_step, donate_argnums=0).lower(self.state, batches[0])
            self.step = lowered.compile()
            self.batches = jax.device_put(batches, NamedSharding(mesh, P()))
        else:
            fusion = "never" if "never" in name else "auto"
            with make_multi_mesh(mesh, config), enable_task_fusion(fusion):
                lowered = mjit(train_step, donate_argnums=0).lower(self.state, batches[0])
            self.program, self.step = lowered.program, lowered.compile()
            (_, at), _ = self.step.input_shardings
            self.batches = [prepare_batch(b, 0, size, sharding=at) for b in batches]
        self.compile_seconds = time.perf_counter() - began

    def init_state(self) -> State:
        params = init_params(self.config, jax.random.key(0))
        return params, make_optimizer().init(params)

    def __call__(self) -> Any:
        batch = self.batches[len(self.losses) % len(self.batches)]
        self.state, loss = self.step(self.state, batch)
        self.losses.append(loss)
        return loss


def host_seconds(trainer: Trainer) -> float:
    """Seconds until a call returns, the device idle before it."""
    jax.block_until_ready(trainer.state)
    began = time.perf_counter()
    loss = trainer()
    seconds = time.perf_counter() - began
    jax.block_until_ready(loss)
    return seconds


def main() -> None:
    """Measures the trainers in turn; prints times, losses and what was compiled."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="of one microbatch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=Trainer.NAMES, help="runs this one, for its memory")
    args = parser.parse_args()
    config = Config(args.layers, args.width, args.heads, args.context, bf16=True)
    text = Text()
    batches = [text.batch(NUM_MICROBATCHES * args.rows, args.context) for _ in range(4)]
    names = Trainer.NAMES if args.only is None else (args.only,)
    trainers = {name: Trainer(name, config, batches) for name in names}

    timings = measure(trainers, num_rounds=args.rounds, calls_per_round=1)
    device = jax.devices()[0]
    tokens = f"{NUM_MICROBATCHES} x {args.rows} x {args.context} tokens"
    title = f"{device.device_kind}, {args.layers} layers of width {args.width}, {tokens}"
    print_table(title, {"": timings}, names[0])
    num_params = sum(leaf.size for leaf in jax.tree.leaves(trainers[names[0]].state[0]))
    flops = 6 * num_params * NUM_MICROBATCHES * args.rows * args.context
    for name, trainer in trainers.items():
        ratio = paired_ratio(timings[name], timings[names[0]])
        print(
            f"{name}: {ratio:.3f} of {names[0]}, "
            f"{flops / timings[name].median_wall / 1e12:.0f} TFLOP/s of parameters, "
            f"the call returns after {host_seconds(trainer) * 1e3:.1f} ms, "
            f"compiled in {trainer.compile_seconds:.1f} s"
        )
        losses = jnp.stack(trainer.losses)
        print("   losses", " ".join(f"{loss:.4f}" for loss in np.asarray(losses)[:8]))
        if trainer.program is not None:
            tasks = trainer.program.tasks
            print(f"   {len(tasks)} tasks, {sum(task.num_runs for task in tasks)} runs a step")
    stats = device.memory_stats() or {}
    if args.only and "peak_bytes_in_use" in stats:
        print(f"peak of memory {stats['peak_bytes_in_use'] / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
