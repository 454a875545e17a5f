"""Compute bound: a pipelined gradient, against other ways to compute the same one.

Eight tanh layers of width 512 on two stages of one device, eight microbatches of 256 rows; each
candidate returns the loss and the gradients of all layers.

- `one device`: gradient accumulation by `lax.scan` in one `jax.jit`;
- `by hand`: the MPMD loop that one would write: a jit a stage, `jax.device_put`, 1F1B order;
- `spmd`: one program for both devices, a scan over ticks with `ppermute` (it also computes in the
  bubble, on zeros);
- `ours`.

CPU seconds are what counts: the devices share the cores of the machine, so no pipeline is faster
here than one device, but what it computes in vain or copies shows.

Run it with `python benchmarks/compute.py [--rows 256] [--width 512] [--rounds 15]`.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

from jax_plugins.multimesh import init

init(cpus=2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from _measure import measure, print_table  # noqa: E402
from _models import MLP  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

from multimesh._src.frontend.batches import prepare_batch  # noqa: E402
from multimesh.jax import MultiMesh, microbatch, mjit  # noqa: E402

NUM_STAGES = 2
LAYERS_A_STAGE = 4
NUM_MICROBATCHES = 8

Run = Callable[[], Any]


def stage_of(params: Any, x: Any) -> Any:
    """The layers of one stage, params [layers, width, width]."""
    for index in range(LAYERS_A_STAGE):
        x = jnp.tanh(x @ params[index])
    return x


def last_loss(params: Any, x: Any) -> Any:
    """The last stage and the loss of one microbatch."""
    return jnp.square(stage_of(params, x)).mean()


# --- the candidates -------------------------------------------------------------------------------


def one_device(params: list[Any], batch: np.ndarray) -> Run:
    """Gradient accumulation on one device."""
    gradient = jax.value_and_grad(MLP.loss)

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        def accumulate(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradient(params, x)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(accumulate, zeros, batch)[0]

    params, xs = jax.device_put((params, by_microbatch(batch)), jax.devices()[0])
    return lambda: step(params, xs)


def by_hand(params: list[Any], batch: np.ndarray) -> Run:
    """One jit a stage and direction, moved and ordered by hand as 1F1B does on two stages."""
    first, last = jax.devices()
    forward = jax.jit(functools.partial(jax.vjp, stage_of))

    @functools.partial(jax.jit, donate_argnums=2)
    def backward(vjp: Any, dy: Any, total: Any) -> Any:
        return total + vjp(dy)[0]

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def forward_backward(params: Any, x: Any, loss: Any, total: Any) -> Any:
        value, (dparams, dx) = jax.value_and_grad(last_loss, (0, 1))(params, x)
        return loss + value, total + dparams, dx

    halves = np.split(np.stack(params), NUM_STAGES)
    first_params = jax.device_put(halves[0], first)
    last_params = jax.device_put(halves[1], last)
    xs = [jax.device_put(x, first) for x in by_microbatch(batch)]
    zeros = [jax.jit(jnp.zeros_like, out_shardings=p.sharding) for p in (first_params, last_params)]

    def run() -> Any:
        totals = [zeros[0](first_params), zeros[1](last_params)]
        loss = jax.device_put(np.float32(0), last)
        y, waiting = forward(first_params, xs[0])
        for index in range(len(xs)):
            x, vjp = jax.device_put(y, last), waiting
            if index + 1 < len(xs):
                y, waiting = forward(first_params, xs[index + 1])
            loss, totals[1], dx = forward_backward(last_params, x, loss, totals[1])
            totals[0] = backward(vjp, jax.device_put(dx, first), totals[0])
        return loss, totals

    return run


def spmd(params: list[Any], batch: np.ndarray) -> Run:
    """One program: every device runs its stage in every tick and hands on what it made."""
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    num_ticks = NUM_MICROBATCHES + NUM_STAGES - 1

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))
    def losses(params: Any, xs: Any) -> Any:
        stage = jax.lax.axis_index("stage")

        def tick(x: Any, number: Any) -> Any:
            fresh = xs[jnp.minimum(number, NUM_MICROBATCHES - 1)]
            y = stage_of(params, jnp.where(stage == 0, fresh, x))
            counts = (stage == NUM_STAGES - 1) & (number >= NUM_STAGES - 1)
            loss = jnp.where(counts, jnp.square(y).mean(), 0)
            return jax.lax.ppermute(y, "stage", [(0, 1), (1, 0)]), loss

        start = jax.lax.pcast(jnp.zeros_like(xs[0]), "stage", to="varying")
        return jax.lax.scan(tick, start, jnp.arange(num_ticks))[1].sum()[None]

    step = jax.jit(jax.value_and_grad(lambda params, xs: losses(params, xs).sum()))
    stacked = jax.device_put(np.stack(params), NamedSharding(mesh, P("stage")))
    xs = jax.device_put(by_microbatch(batch), NamedSharding(mesh, P()))
    return lambda: step(stacked, xs)


def ours(params: list[Any], batch: np.ndarray) -> Run:
    """The same gradient through `mjit`."""
    size = len(batch) // NUM_MICROBATCHES
    multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()), ("stage",)))
    multi_mesh.register_layers(r"layer\d+", num_layers=len(params), axis="stage")
    with multi_mesh:
        step = mjit(microbatch(jax.value_and_grad(MLP.loss), 0, size, argnum=1, schedule="1f1b"))
    compiled = step.trace(params, batch).lower().compile()
    (params_at, batch_at), _ = compiled.input_shardings
    params = jax.device_put(params, params_at)
    stored = prepare_batch(batch, 0, size, sharding=batch_at)
    return lambda: step(params, stored)


# --- the table ------------------------------------------------------------------------------------


def by_microbatch(batch: np.ndarray) -> np.ndarray:
    """[rows, width] -> [microbatches, rows of one, width]."""
    return batch.reshape(NUM_MICROBATCHES, -1, batch.shape[1])


def gradients(result: Any) -> np.ndarray:
    """The gradients of all layers in order, whatever the candidate keeps them in."""
    width = jax.tree.leaves(result)[-1].shape[-1]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result[1])]
    return np.concatenate([leaf.reshape(-1, width, width) for leaf in leaves])


def main() -> None:
    """Checks that all candidates agree, measures them and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256, help="of one microbatch")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    params = MLP.params(NUM_STAGES * LAYERS_A_STAGE, args.width)
    batch = MLP.batch(NUM_MICROBATCHES * args.rows, args.width)
    makers = {"one device": one_device, "by hand": by_hand, "spmd": spmd, "ours": ours}
    candidates = {name: maker(params, batch) for name, maker in makers.items()}
    wanted = gradients(candidates["one device"]())
    for name, run in candidates.items():
        np.testing.assert_allclose(gradients(run()), wanted, atol=1e-5, err_msg=name)

    timings = measure(candidates, num_rounds=args.rounds, calls_per_round=1)
    title = f"{NUM_STAGES} stages, {NUM_MICROBATCHES} microbatches of {args.rows} x {args.width}"
    print_table(title, {"": timings}, "one device")
    mine = timings["ours"].cpu
    for name in ("one device", "by hand", "spmd"):
        pairs = zip(mine, timings[name].cpu, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        least = min(mine) / min(timings[name].cpu)
        print(f"CPU seconds, ours / {name}: {ratio:.3f} in the median round, {least:.3f} at best")


if __name__ == "__main__":
    main()
