"""Flax Linen: modules as explicit tasks, kernels with axis names, and a whole training step.

    first = flax.task(Block(), mesh_slice={"stage": 0})      # inside a model's `__call__`
    nn.Dense(4, kernel_init=flax.shard_axes("data", "model"))
    step, state, mesh = flax.parallelize_step(model, optax.adam(1e-3), mesh, batch)
    loss, state = step(state, batch)

Linen opens a named scope for every module, so registered matchers find modules as they are; `task`
is for those that are placed where they are made.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import struct
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.errors import TraceError, message
from multimesh._src.frontend.contexts import active_contexts
from multimesh._src.frontend.markers import task as task_function
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tasks import Task
from multimesh._src.staging.in_place import init, shapes_of
from multimesh._src.staging.mjit import mjit

SEED = 42  # as the original has it


# --- modules as tasks -----------------------------------------------------------------------------


class TaskModule(nn.Module):
    """A module that runs as one explicit task. Its variables are those of `mod`, under `mod`."""

    mod: nn.Module
    task_name: str | None = None
    task: Task | None = None
    fields: tuple[tuple[str, Any], ...] = ()

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module inside its task."""
        given = self.task.name if self.task is not None else None
        name = self.task_name or given or "/".join(self.path) or type(self.mod).__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.mod(*args, **kwargs)

        return task_function(call, name, task=self.task, **dict(self.fields))(*args, **kwargs)


def task(
    model: nn.Module, name: str | None = None, *, task: Task | None = None, **fields: Any
) -> nn.Module:
    """Returns a module that runs `model` as one task, without a matcher.

    The new module has the class name `Task[<class of the model>]`, and the variables of the model
    under `mod`; it takes what the model takes. Gradients are those of the model.

    Args:
        model: A Linen module.
        name: Name of the task. Default: that of `task`, else the path of the module in its model.
        task: Where and how it runs.
        **fields: Fields of `Task`, instead of `task`.

    Raises:
        MatchError: When it is called: `task` together with fields, or an unknown field.
    """
    kind = type(f"Task[{type(model).__name__}]", (TaskModule,), {"__doc__": TaskModule.__doc__})
    return kind(mod=model, task_name=name, task=task, fields=tuple(fields.items()))


def shard_axes(*names: str | None) -> Callable[..., Any]:
    """Returns an initializer of kernels (Xavier normal) whose dims are named.

    Args:
        *names: The logical axis of each dim; None leaves a dim whole.
    """
    return nn.with_partitioning(nn.initializers.xavier_normal(), names)


# --- a training step ------------------------------------------------------------------------------


class State(TrainState):
    """Parameters, optimizer state and the other variables of a model (batch statistics, ...)."""

    extra: Any = struct.field(default_factory=dict)


def parallelize_step(
    model: nn.Module,
    optimizer: Any,
    mesh: Mesh | MultiMesh,
    global_batch: Any = None,
    local_batch: Any = None,
    replicate_inputs: bool = True,
    *,
    num_microbatches: int = 1,
    schedule: Any = None,
    seed: int = SEED,
) -> tuple[Any, ...]:
    """Compiles a training step of a model that returns its loss, and makes its state in place.

    Tasks come from the matchers that are registered here and from `task`; names of kernels and
    constraints are logical axes of each task.

    Args:
        model: `model.apply(variables, batch)` returns the scalar loss, a mean over the batch.
        optimizer: An optax optimizer.
        mesh: The global mesh; that of the active `MultiMesh` where there is one.
        global_batch: A whole batch; or
        local_batch: the batch of one process: dim 0 of all of them together is the batch.
        replicate_inputs: Whether a `global_batch` is replicated; else dim 0 is sharded over the
            first axis of the mesh, as it always is with `local_batch`.
        num_microbatches: Into how many parts dim 0 of a batch is cut.
        schedule: Their schedule.
        seed: Of the initial variables.

    Returns:
        `(step, state, mesh)`, with `local_batch` also a function that makes the batch of all
        processes from a local one. `step(state, batch)` returns `(loss, state)`; its state is
        donated. The state is a Flax `TrainState` with the other variables as `extra`.

    Raises:
        TraceError: Neither or both batches; a loss that is no scalar; variables that change in
            every call together with microbatches.
    """
    _check_batches(global_batch, local_batch)
    active = active_contexts().multi_mesh
    multi_mesh = active if active is not None else MultiMesh(global_mesh=mesh)
    whole = multi_mesh.global_mesh
    assert whole is not None

    def prepare_batch(local: Any) -> Any:
        place = NamedSharding(whole, PartitionSpec(whole.axis_names[0]))
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(place, np.asarray(x)), local
        )

    batch = global_batch
    if local_batch is not None or not replicate_inputs:
        batch = prepare_batch(global_batch if local_batch is None else local_batch)
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)

    def make_state(key: Any) -> State:
        variables = dict(model.init(key, jax.tree.map(_zeros, shape)))
        params = variables.pop("params", {})
        return State.create(apply_fn=model.apply, params=params, tx=optimizer, extra=variables)

    step = _make_step(shape, num_microbatches, schedule)
    with multi_mesh:
        key = jax.random.key(seed)
        shapes = shapes_of(make_state, (key,))
        compiled = mjit(step, donate_argnums=0).lower(shapes, batch).compile()
        state = init(make_state, like=compiled)(key)
    made = (compiled, state, whole)
    return made if local_batch is None else (*made, prepare_batch)


def _zeros(shape: Any) -> Any:
    return jax.numpy.zeros(shape.shape, shape.dtype)


def _make_step(batch: Any, num_microbatches: int, schedule: Any) -> Callable[..., Any]:
    """A function (state, batch) -> (loss, state)."""

    def step(state: State, batch: Any) -> tuple[Any, State]:
        mutable = list(state.extra)
        if mutable and num_microbatches > 1:
            raise TraceError(
                message(
                    f"the model has variables {mutable} that every call may change, and "
                    f"`num_microbatches={num_microbatches}`.",
                    ways=("use `num_microbatches=1`.", "use a norm without running statistics."),
                )
            )

        def loss_of(params: Any, batch: Any) -> tuple[Any, Any]:
            variables = {"params": params, **state.extra}
            if not mutable:
                return state.apply_fn(variables, batch), {}
            return state.apply_fn(variables, batch, mutable=mutable)

        gradient = jax.value_and_grad(loss_of, has_aux=True)
        if num_microbatches > 1:
            gradient = _by_microbatch(gradient, batch, num_microbatches, schedule)
        (loss, extra), grads = gradient(state.params, batch)
        return loss, state.apply_gradients(grads=grads).replace(extra=extra)

    return step


def _by_microbatch(gradient: Any, batch: Any, num_microbatches: int, schedule: Any) -> Any:
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % num_microbatches:
        raise TraceError(
            message(
                f"a batch of `{rows}` rows is not cut into `num_microbatches={num_microbatches}` "
                "equal parts.",
                ways=("choose a number that divides the rows.",),
            )
        )
    size = rows // num_microbatches
    return microbatch(gradient, 0, size, argnum=1, schedule=schedule, reduce="mean")


def _check_batches(global_batch: Any, local_batch: Any) -> None:
    if (global_batch is None) == (local_batch is None):
        given = "neither" if global_batch is None else "both"
        raise TraceError(
            message(
                f"`parallelize_step` got {given} of `global_batch` and `local_batch`.",
                ways=(
                    "give `global_batch=`, the whole batch.",
                    "give `local_batch=`, the part of this process.",
                ),
            )
        )
