"""Trains a byte-level GPT on the sources of Python, pipelined over 8 CPU devices.

The model (`_gpt.py`) is an ordinary Flax module and knows nothing of stages. What it takes to
pipeline it stands in `make_multi_mesh`. Run it with

    python examples/train_gpt.py --schedule 1f1b
    python examples/train_gpt.py --stages 4 --data 1 --model 2 --untied --dropout 0.1

`--timeline step.json` measures the trained step: tables of who waits and why, a drawing, and a
trace for https://ui.perfetto.dev (`step.png` draws an image instead).

`--check` also runs the same function by plain `jax.jit`: the first steps are compared array by
array (see `tests/oracle.py`), afterwards the losses.
"""

import argparse
import time

from jax_plugins.multimesh import init

init(cpus=8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from _common import Check, print_program  # noqa: E402
from _gpt import Config, Text, empty_cache, init_params, loss_fn, make_generate  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress, TextColumn  # noqa: E402

from multimesh.jax import MultiMesh, Task, debug, microbatch, mjit  # noqa: E402
from multimesh.jax.schedules import grid  # noqa: E402

NUM_MICROBATCHES = 8
NUM_SAMPLES = 2
SEED = 0
PROMPT = b"import os\n\n\nclass "


def make_multi_mesh(args):
    """Says which part of the model lives where."""
    axis_type = AxisType.Explicit if args.explicit else AxisType.Auto
    mesh = jax.make_mesh(
        (args.stages, args.data, args.model), ("stage", "data", "model"), (axis_type,) * 3
    )
    multi_mesh = MultiMesh(global_mesh=mesh)
    # In the V placement the last stage lies where the first does.
    end = 0 if args.placement == "v" else args.stages - 1
    last = Task(name="logits", mesh_slice={"stage": end})
    # With tied weights the logits are made by `embed.attend`, which `embed` would match too.
    multi_mesh.register_task(r"embed\.attend|final_norm|head", task=last)
    first = Task(name="embed", mesh_slice={"stage": 0})
    multi_mesh.register_task(r"embed|position", task=first)
    multi_mesh.register_layers(
        r"block_\d+",
        num_layers=args.layers,
        axis="stage",
        interleave=args.interleave,
        placement=args.placement,
    )
    return multi_mesh


def make_optimizer(num_steps):
    """Clipping, and adamw with a short warm-up."""
    warm_up = min(40, num_steps // 4)
    rate = optax.warmup_cosine_decay_schedule(1e-4, 6e-3, warm_up, num_steps, 6e-4)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, eps=1e-5, weight_decay=1e-2)
    )


def make_train_step(config, optimizer, batch_size, schedule):
    """A function (state, text) -> (state, loss) that pipelines its microbatches."""

    def train_step(state, text):
        def loss_and_grads(params, text, index):
            key = None
            if config.dropout:
                number = state["step"] * NUM_MICROBATCHES + index
                key = jax.random.fold_in(jax.random.key(SEED), number)
            return jax.value_and_grad(lambda p: loss_fn(config, p, text, key))(params)

        size = batch_size // NUM_MICROBATCHES
        pipelined = microbatch(
            loss_and_grads, 0, size, argnum=1, schedule=schedule, reduce="mean", with_index=True
        )
        params = state["params"]
        loss, grads = pipelined(params, text)
        updates, opt_state = optimizer.update(grads, state["optimizer"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "optimizer": opt_state, "step": state["step"] + 1}, loss

    return train_step


def make_eval_step(config, size):
    """A function (params, text) -> loss: the forward half alone, pipelined."""
    loss = microbatch(
        lambda params, text: loss_fn(config, params, text), 0, size, argnum=1, reduce="mean"
    )
    return lambda params, text: loss(params, text)


def train(step, state, text, args, check, console):
    """Takes `args.steps` steps; returns the last state and all losses."""
    columns = (
        *Progress.get_default_columns(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
    )
    losses = []
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=args.steps, loss=float("nan"), speed=0.0)
        began = time.perf_counter()
        for number in range(args.steps):
            batch = text.batch(args.batch, args.context)
            state, loss = step(state, batch)
            if check:
                check.step(batch, (state, loss))
            losses.append(float(loss))
            if number == 0:  # tracing and compiling do not count
                began = time.perf_counter()
            tokens = number * args.batch * args.context
            speed = tokens / max(time.perf_counter() - began, 1e-9)
            progress.update(bar, advance=1, loss=losses[-1], speed=speed)
    return state, losses


def show_timeline(step, state, batch, path, console):
    """Measures the step and shows where its time goes; also writes it to a file."""
    timeline = debug.measure(step, state, batch)
    console.print(timeline)
    console.print(timeline.grid(width=console.width, color=False), highlight=False)
    (timeline.plot if path.endswith(".png") else timeline.save)(path)
    console.print(f"timeline written to {path}")


def generate_text(generate, config, params, prompt):
    """Continues the prompt up to the whole context, in several samples."""
    prompt = np.tile(np.frombuffer(prompt, np.uint8).astype(np.int32), (NUM_SAMPLES, 1))
    cache = empty_cache(config, NUM_SAMPLES)
    text, _ = generate(params, cache, prompt, jax.random.key(SEED))
    return [bytes(row.astype(np.uint8)).decode("utf-8", "replace") for row in np.asarray(text)]


def run(args, console):
    """Trains, evaluates, and shows what was made of the step."""
    config = Config(
        num_layers=args.layers,
        width=args.width,
        context=args.context,
        tied=args.tied,
        dropout=args.dropout,
        bf16=args.bf16,
    )
    optimizer = make_optimizer(args.steps)
    train_step = make_train_step(config, optimizer, args.batch, args.schedule)
    text = Text(SEED)

    def init_state(key):
        params = init_params(config, key)
        return {"params": params, "optimizer": optimizer.init(params), "step": np.int32(0)}

    with make_multi_mesh(args):
        state = jax.tree.map(np.asarray, jax.jit(init_state)(jax.random.key(SEED)))
        step = mjit(train_step, donate_argnums=0)
        evaluate = mjit(make_eval_step(config, args.batch // NUM_MICROBATCHES))
        generate = mjit(make_generate(config), donate_argnums=1)

    batch = text.batch(args.batch, args.context)
    sizes = {"data": args.data, "model": args.model}
    check = Check(train_step, state, batch, **sizes) if args.check else None
    state, losses = train(step, state, text, args, check, console)
    if check:
        check.report(console)

    lowered = step.lower(state, batch)
    print_program(console, lowered.program)
    console.print(grid(lowered.schedule, width=console.width, color=False), highlight=False)
    if args.timeline:
        show_timeline(step, state, batch, args.timeline, console)
    held_out = [text.batch(args.batch, args.context, held_out=True) for _ in range(8)]
    loss = np.mean([float(evaluate(state["params"], batch)) for batch in held_out])
    prompt = PROMPT[: args.context // 2]
    for sample in generate_text(generate, config, state["params"], prompt):
        console.rule("generated")
        console.print(sample, markup=False, highlight=False)
    console.rule()
    console.print(f"bigram entropy of the text {text.bigram_entropy():.3f} nats a byte")
    console.print(f"loss on held-out files     {loss:.3f}")
    console.print(f"mean of the last 10 losses {np.mean(losses[-10:]):.3f}")


def parse_args():
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", default="1f1b", help="any of multimesh.jax.schedules")
    parser.add_argument("--interleave", type=int, default=1, help="stages on each submesh")
    parser.add_argument("--placement", choices=("loop", "v"), default="loop", help="of the stages")
    parser.add_argument("--steps", type=int, default=400)
    for name, size in (("stages", 2), ("data", 2), ("model", 2)):
        parser.add_argument(f"--{name}", type=int, default=size, help="size of the mesh axis")
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    for name, size in (("layers", 4), ("width", 96), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--batch", type=int, default=32, help="rows of a batch, 8 microbatches")
    parser.add_argument("--tied", action="store_true", default=True, help="the default")
    parser.add_argument("--untied", action="store_false", dest="tied", help="logits of their own")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 products, float32 sums")
    parser.add_argument("--timeline", metavar="FILE", help="measure the step; .json or .png")
    parser.add_argument("--check", action="store_true", help="compare with plain jax.jit")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_args(), Console())
