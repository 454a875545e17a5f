"""Trains a pipelined classifier of handwritten digits on 8 CPU devices: stage x data x model.

The model and the update are plain JAX; the only words about devices are the registration of its
four layers and two sharding constraints. Run it with

    python examples/train_digits.py --schedule 1f1b --check

`--check` also runs the same function by plain `jax.jit`: the first steps are compared array by
array (see `tests/oracle.py`), afterwards the losses. With `--checkpoint DIR` a run that was
interrupted by Ctrl-C goes on where it was when it is started again.
"""

import argparse
import itertools
import sys

from jax_plugins.multimesh import init

init(cpus=8)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from _common import Check, Checkpoints, print_program  # noqa: E402
from jax.sharding import Mesh, PartitionSpec as P  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress, TextColumn  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

from multimesh.jax import (  # noqa: E402
    MultiMesh,
    microbatch,
    mjit,
    with_sharding_constraint,
)

NUM_LAYERS = 4
WIDTH = 128
NUM_CLASSES = 10
BATCH_SIZE = 256
NUM_MICROBATCHES = 8
NUM_TEST = 360
WANTED_ACCURACY = 0.95

optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(3e-3, 300), weight_decay=1e-2),
)


def init_params(key):
    """One weight [in, out] and one bias [out] a layer."""
    sizes = [64, *[WIDTH] * (NUM_LAYERS - 1), NUM_CLASSES]
    keys = jax.random.split(key, NUM_LAYERS)
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def model(params, images):
    """images [batch, 64] -> logits [batch, 10]."""
    x = with_sharding_constraint(images, P("data", None))
    for index, layer in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            # Alternately split over columns and rows, so that a pair of layers meets once.
            spec = P(None, "model") if index % 2 == 0 else P("model", None)
            w = with_sharding_constraint(layer["w"], spec)
            x = x @ w + layer["b"]
            if index < NUM_LAYERS - 1:
                x = jax.nn.gelu(x)
    return x


def loss_fn(params, batch):
    """Mean cross entropy of a batch of images and labels."""
    logits = model(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def make_train_step(schedule):
    """A function (state, batch) -> (state, loss) that pipelines its microbatches."""

    def train_step(state, batch):
        params, opt_state = state
        size = BATCH_SIZE // NUM_MICROBATCHES
        grad_fn = microbatch(
            jax.value_and_grad(loss_fn), 0, size, argnum=1, schedule=schedule, reduce="mean"
        )
        loss, grads = grad_fn(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def load_data():
    """Training and test images and labels, pixels in 0..1."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    train = {"image": images[NUM_TEST:], "label": labels[NUM_TEST:]}
    return train, {"image": images[:NUM_TEST], "label": labels[:NUM_TEST]}


def batches(train, num_steps):
    """Yields `num_steps` random batches."""
    draw = np.random.default_rng(1)
    for _ in range(num_steps):
        rows = draw.choice(len(train["label"]), BATCH_SIZE, replace=False)
        yield {name: array[rows] for name, array in train.items()}


def train(args, console):
    """Trains and returns the accuracy on the test images."""
    data, test = load_data()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("stage", "data", "model"))
    multi_mesh = MultiMesh(global_mesh=mesh)
    multi_mesh.register_layers(r"layer\d+", num_layers=NUM_LAYERS, axis="stage")

    train_step = make_train_step(args.schedule)
    params = init_params(jax.random.key(0))
    state = jax.tree.map(np.asarray, (params, optimizer.init(params)))
    first_batch = next(batches(data, 1))
    with multi_mesh:
        step = mjit(train_step, donate_argnums=0).lower(state, first_batch).compile()
        predict = mjit(lambda params, images: jnp.argmax(model(params, images), -1))

    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.4f}"))
    with (
        Checkpoints(args.checkpoint) as checkpoints,
        Progress(*columns, console=console) as progress,
    ):
        done, state = checkpoints.latest(step, state)
        on_host = jax.tree.map(np.asarray, state)
        check = Check(train_step, on_host, first_batch) if args.check else None
        bar = progress.add_task("training", total=args.steps, completed=done, loss=float("nan"))
        for batch in itertools.islice(batches(data, args.steps), done, None):
            state, loss = step(state, batch)
            done += 1
            if check:
                check.step(batch, (state, loss))
            progress.update(bar, advance=1, loss=float(loss))
            if checkpoints.save(done, state, last=done == args.steps):
                sys.exit(f"stopped after step {done}; the same command goes on from there")

    print_program(console, step.program)
    if check:
        check.report(console)
    predicted = np.asarray(predict(state[0], test["image"]))
    return float((predicted == test["label"]).mean())


def main():
    """Parses the arguments, trains and says how good it got."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b or eager-1f1b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", metavar="DIR", help="go on from there, and save there")
    parser.add_argument("--check", action="store_true", help="compare with plain jax.jit")
    args = parser.parse_args()
    console = Console()
    accuracy = train(args, console)
    console.print(f"test accuracy {accuracy:.1%}")
    if accuracy < WANTED_ACCURACY:
        sys.exit(f"the accuracy is below {WANTED_ACCURACY:.0%}")


if __name__ == "__main__":
    main()
