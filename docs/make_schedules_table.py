"""Writes the table of docs/schedules.md: one tiny model, trained with every schedule.

Eight tanh layers on four submeshes, eight microbatches, a few steps of gradient descent. The losses
are what the submeshes computed; makespan, idle share and peaks are those of the simulated schedule
of the very same program, with layers that all take equally long.

Run it with `python docs/make_schedules_table.py`; `--check` only says whether the page is current.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jax_plugins.multimesh import init

init(cpus=4)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from multimesh.jax import MultiMesh, microbatch, mjit, schedules  # noqa: E402

PAGE = Path(__file__).with_name("schedules.md")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
NUM_RANKS, NUM_LAYERS, NUM_MICROBATCHES, SIZE, WIDTH, NUM_STEPS = 4, 8, 8, 2, 16, 5
# name: stages a rank, placement
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
HEAD = ("schedule", "stages a rank", "loss", "makespan", "idle", "peak sets, by rank")


def loss(params: Any, batch: Any) -> jax.Array:
    """Mean square of `batch = (x [rows, WIDTH], y [rows, WIDTH])`."""
    x, y = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def train(name: str | None) -> tuple[float, schedules.Simulation | None]:
    """Trains with a schedule, or with None under plain `jax.jit`; returns the last loss."""
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS + 1)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys[1:]]
    x = jax.random.normal(keys[0], (NUM_MICROBATCHES * SIZE, WIDTH))
    batch = (x, jnp.tanh(jnp.roll(x, 1, axis=1)))

    def step(params: Any, batch: Any) -> Any:
        gradient = microbatch(
            jax.value_and_grad(loss), 0, SIZE, argnum=1, schedule=name, reduce="mean"
        )
        value, grads = gradient(params, batch)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    if name is None:
        compiled, simulation = jax.jit(step), None
    else:
        chunks, placement = SCHEDULES[name]
        mesh = Mesh(np.array(jax.devices()), ("stage",))
        with MultiMesh(global_mesh=mesh) as multi_mesh:
            multi_mesh.register_layers(
                r"layer(\d+)", num_layers=NUM_LAYERS, interleave=chunks, placement=placement
            )
            compiled = mjit(step).lower(params, batch).compile()
        simulation = compiled.schedule
    for _ in range(NUM_STEPS):
        params, value = compiled(params, batch)
    return float(value), simulation


def row(name: str, value: float, simulation: schedules.Simulation) -> tuple[str, ...]:
    """The cells of a schedule; a rank's forward of a microbatch takes one unit of time."""
    chunks, _ = SCHEDULES[name]
    costs = dict.fromkeys("FBW", 1 / chunks)
    found = schedules.simulate(simulation.schedule, simulation.graph, costs=costs)
    peaks = found.peaks
    sets = " ".join(map(str, peaks.until_b))
    if peaks.until_w != peaks.until_b:
        sets += f" until B, {' '.join(map(str, peaks.until_w))} until W"
    makespan, idle = f"{found.makespan:g}", f"{found.bubble_share:.0%}"
    return (f"`{name}`", str(chunks), f"{value:.6f}", makespan, idle, sets)


def make_table() -> str:
    """The table as Markdown."""
    plain, _ = train(None)
    rows = [row(name, *train(name)) for name in SCHEDULES]
    losses = {cells[2] for cells in rows}
    if losses != {f"{plain:.6f}"}:
        raise SystemExit(f"the losses {sorted(losses)} are not plain jax.jit's {plain:.6f}")
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    head, rest = before.split(BEGIN)
    _, tail = rest.split(END)
    after = f"{head}{BEGIN}\n{make_table()}\n{END}{tail}"
    if check:
        sys.exit("docs/schedules.md is out of date" if after != before else 0)
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
