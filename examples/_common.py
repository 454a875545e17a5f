"""What the examples share: `--check` against plain `jax.jit`, `--checkpoint`, and tables."""

import contextlib
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rich import box
from rich.table import Table

from multimesh.jax import checkpoint

NUM_CHECKED_STEPS = 5


class Check:
    """Runs the same steps by plain `jax.jit`, on one device and on one mesh, and compares.

    The first steps are compared array by array (`tests/oracle.py`), afterwards the losses.

    Args:
        train_step: A function (state, batch) -> (state, loss) with a microbatch loop.
        state: Where training begins, on the host.
        batch: A batch of the right types.
        data: Size of the mesh's data axis; every leaf of a batch is split over it.
        model: Size of its model axis.
    """

    def __init__(self, train_step, state, batch, *, data=2, model=2):
        sys.path.append(str(Path(__file__).parents[1]))
        from tests import oracle

        self.tools = oracle
        devices = np.array(jax.devices()[: data * model])
        self.meshes = [
            Mesh(devices[: np.prod(sizes)].reshape(sizes), ("data", "model"))
            for sizes in ((1, 1), (data, model))
        ]
        self.states = [jax.device_put(state, NamedSharding(mesh, P())) for mesh in self.meshes]
        with jax.set_mesh(self.meshes[0]):
            self.oracle = oracle.Oracle(train_step, state, batch)
        self.exact = state
        self.plain_step = jax.jit(train_step)
        self.num_steps = self.num_bitwise = self.num_arrays = self.num_unclear = 0
        self.largest_later = 0.0

    def step(self, batch, ours):
        """Takes the plain step on `batch` and compares its results with `ours`."""
        results = [self.plain(*pair, batch) for pair in zip(self.meshes, self.states, strict=True)]
        self.states = [state for state, _ in results]
        self.num_steps += 1
        if self.num_steps > NUM_CHECKED_STEPS:
            difference = abs(float(results[0][1]) - float(ours[1]))
            self.largest_later = max(self.largest_later, difference)
            return
        exact = self.oracle(self.exact, batch)
        self.exact = exact[0]
        comparison = self.tools.compare(ours, *results, exact)
        with contextlib.suppress(self.tools.IllConditionedError):  # they are counted below
            comparison.check()
        self.num_unclear += sum(leaf.ill_conditioned for leaf in comparison.leaves)
        self.num_bitwise += comparison.num_bitwise
        self.num_arrays += len(comparison.leaves)

    def plain(self, mesh, state, batch):
        """One step of plain JAX, the batch split over the data axis of `mesh`."""
        with jax.set_mesh(mesh):
            return self.plain_step(state, jax.device_put(batch, NamedSharding(mesh, P("data"))))

    def report(self, console):
        """Prints what was compared."""
        num_steps = min(self.num_steps, NUM_CHECKED_STEPS)
        console.print(
            f"check: the losses, parameters and optimizer states of {num_steps} steps are "
            f"within bounds of plain jax.jit ({self.num_bitwise} of {self.num_arrays} arrays are "
            f"equal bit for bit, {self.num_unclear} are too ill-conditioned to judge); "
            f"largest later difference of a loss {self.largest_later:.2e}"
        )


class Checkpoints:
    """The newest states of a run in a directory; without a directory it does nothing.

    Ctrl-C ends the run behind the step that is running, with a last checkpoint; a second Ctrl-C
    ends it at once.
    """

    def __init__(self, directory, *, every=20):
        self.manager = None
        self.stopped = False
        if directory:
            import orbax.checkpoint as ocp

            options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=every)
            self.manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)
            self.args = ocp.args
            self.previous = signal.signal(signal.SIGINT, self.stop)

    def stop(self, *_):
        self.stopped = True
        signal.signal(signal.SIGINT, self.previous)

    def latest(self, compiled, state):
        """The number of steps taken so far and the state behind them, where `compiled` takes it."""
        number = self.manager.latest_step() if self.manager else None
        if number is None:
            return 0, state
        return number, checkpoint.restore(self.manager.directory / str(number), compiled)

    def save(self, number, state, *, last=False):
        """Saves the state behind step `number`, if it is time; returns whether to stop.

        Writing goes on in the background, and the next step may take the state's memory.
        """
        if self.manager and number != self.manager.latest_step():
            args = self.args.StandardSave(state)
            self.manager.save(number, args=args, force=last or self.stopped)
        return self.stopped

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.manager:
            signal.signal(signal.SIGINT, self.previous)
            self.manager.close()  # when all is written


def print_program(console, program):
    """Prints what the step was cut into; `rich.print(program)` shows more."""
    tasks = table("tasks", "task", "kind", "stage", "submesh", "runs a step")
    for task in program.tasks:
        stage = str(task.stage) if task.stage >= 0 else "-"
        row = (task.label, task.kind, stage, task.submesh, str(task.num_runs))
        tasks.add_row(*row)
    reshards = table("reshards, of a step", "value of", "type", "edge", "copies", "bytes")
    for move in (move for move in program.reshards if move.bytes):
        made_by = move.value if move.source in ("argument", "constant") else move.source
        row = (made_by, move.type, move.edge, str(move.copies), str(move.bytes))
        reshards.add_row(*row)
    console.print(tasks, reshards)


def table(title, *columns):
    """A table in which a narrow terminal cuts no name off, but goes on below."""
    made = Table(title=title, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made
