"""Whole call: a state of 1,000 arrays that stays in place, against plain `jax.jit`'s own call.

The state is 500 parameters and their momenta, donated and updated, nearly without arithmetic. Ours
is a program over four stages of one device; plain `jax.jit` runs the same function on one device.
So what is compared is all that a call does beside computing: trees, checks, donation, results.

Run it with `python benchmarks/call.py [--arrays 1000] [--rounds 25]`.
"""

import argparse
from collections.abc import Callable
from typing import Any

from jax_plugins.multimesh import init

init(cpus=4)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from _measure import measure, print_table  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from multimesh._src.runtime import counters  # noqa: E402
from multimesh.jax import MultiMesh, Task, mjit  # noqa: E402

NUM_STAGES = 4
WIDTH = 8


def update(state: Any) -> Any:
    """One step of momentum; a quarter of the state in each stage's scope."""
    new: Any = {"params": [], "momenta": []}
    num_params = len(state["params"])
    pairs = zip(state["params"], state["momenta"], strict=True)
    for index, (param, momentum) in enumerate(pairs):
        with jax.named_scope(f"stage{index * NUM_STAGES // num_params}"):
            momentum = 0.9 * momentum + param
            new["params"].append(param - 0.01 * momentum)
            new["momenta"].append(momentum)
    return new


def stepping(step: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    """A function that takes one step with the state of the step before."""

    def run() -> Any:
        nonlocal state
        state = step(state)
        return state

    return run


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()

    def state() -> Any:
        half = args.arrays // 2
        zeros = [np.zeros(WIDTH, np.float32) for _ in range(args.arrays)]
        return {"params": zeros[:half], "momenta": zeros[half:]}

    multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()), ("stage",)))
    multi_mesh.register_task(
        r"stage(\d)", callback=lambda text, _: Task(mesh_slice={"stage": int(text)})
    )
    with multi_mesh:
        ours = stepping(mjit(update, donate_argnums=0), state())
    plain = stepping(jax.jit(update, donate_argnums=0), jax.device_put(state(), jax.devices()[0]))
    for _ in range(2):
        ours(), plain()
    before = counters.snapshot()
    timings = measure({"jax.jit": plain, "mjit": ours}, num_rounds=args.rounds)
    moved = counters.since(before)
    assert moved.argument_moves == moved.argument_puts == moved.traces == 0, moved
    title = f"whole call, {args.arrays} arrays in place, {NUM_STAGES} stages"
    print_table(title, {"donated": timings}, "jax.jit")


if __name__ == "__main__":
    main()
