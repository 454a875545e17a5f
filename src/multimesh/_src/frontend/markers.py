"""Markers: scopes of our own that say what the equations under them are.

    with jax.named_scope("multimesh:task:3"):  ...   ->   task_marker("multimesh:task:3").task

A scope can only hold a string, so what it stands for is interned in a table and named by its place
there. Equal markers get one place: traces that JAX has cached keep naming the right one, and
wrapping a function again in every step makes no new one. The tables only grow.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from multimesh._src import config
from multimesh._src.errors import MatchError, message
from multimesh._src.frontend.arguments import check_callable, function_name
from multimesh._src.frontend.scopes import MARKER_PREFIX
from multimesh._src.frontend.tasks import Task
from multimesh._src.jax_compat.constraints import is_redirected

Marker = TypeVar("Marker")

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class ExplicitTask:
    """What `task(fun, ...)` says: a Task with a name."""

    task: Task


@dataclass(frozen=True, slots=True)
class MicrobatchMarker:
    """What `microbatch(fun, ...)` says of its loop, besides what the loop itself shows.

    Attributes:
        num_microbatches: Iterations of the loop.
        size: Rows of a microbatch.
        schedule: As given: a name, a schedule object, or None for the default.
        custom_schedule: Rows as given, as text or a tuple of rows.
        num_stages: As given; the delay of the `wavefront` schedule.
        interleave: As given.
        unrolling: As given.
    """

    num_microbatches: int
    size: int
    schedule: Any = None
    custom_schedule: str | tuple[Any, ...] | None = None
    num_stages: int | None = None
    interleave: int | None = None
    unrolling: int | None = None


@dataclass(slots=True)
class _Table(Generic[Marker]):
    """Markers of one kind by number."""

    kind: str
    markers: list[Marker] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def intern(self, marker: Marker, key: Any) -> str:
        """Returns the scope component of a marker; equal keys get equal components."""
        with self.lock:
            number = self.numbers.setdefault(key, len(self.markers))
            if number == len(self.markers):
                self.markers.append(marker)
        return f"{MARKER_PREFIX}{self.kind}:{number}"

    def look_up(self, component: str) -> Marker | None:
        """Returns the marker of a scope component, None if it is of another kind or unknown."""
        prefix, kind, number = (*component.split(":"), "", "")[:3]
        if f"{prefix}:" != MARKER_PREFIX or kind != self.kind or not number.isdecimal():
            return None
        return self.markers[int(number)] if int(number) < len(self.markers) else None


_tasks: _Table[ExplicitTask] = _Table("task")
_microbatches: _Table[MicrobatchMarker] = _Table("microbatch")


def task_marker(component: str) -> ExplicitTask | None:
    """Returns the explicit task that a component of a scope stands for."""
    return _tasks.look_up(component)


def microbatch_marker(component: str) -> MicrobatchMarker | None:
    """Returns the microbatch loop that a component of a scope stands for."""
    return _microbatches.look_up(component)


def microbatch_scope(marker: MicrobatchMarker) -> contextlib.AbstractContextManager[Any, Any]:
    """Opens the scope of a microbatch loop; no scope under `ignore_transforms`."""
    if config.current_settings().ignore_transforms:
        return contextlib.nullcontext()
    return jax.named_scope(_microbatches.intern(marker, _frozen(marker)))


def transforms_act() -> bool:
    """Whether explicit tasks act here: in mjit and parallelize, or inside a context (R5)."""
    return is_redirected() or bool(config.state().contexts)


def task(
    fun: Callable[..., Any], name: str | None = None, *, task: Task | None = None, **fields: Any
) -> Callable[..., Any]:
    """Makes one task of all that `fun` computes, without a matcher.

    Acts in `mjit` and `parallelize`, and in `jax.jit` inside a context; elsewhere, and under
    `ignore_transforms`, `fun` is left as it is. Gradients are those of `fun`; nothing is recomputed
    that `fun` does not recompute itself.

    Args:
        fun: The function. It is traced in place.
        name: Name of the task; default `task.name`, then `fun.__name__`.
        task: Where and how it runs.
        **fields: Fields of `Task`, instead of `task`.

    Returns:
        A function with the arguments and results of `fun`.

    Raises:
        MatchError: `task` together with fields, or a field that `Task` does not have. What the
            fields hold is checked where the function is traced.

    Example:
        >>> import jax.numpy as jnp
        >>> from multimesh.jax import ignore_transforms, task
        >>> first = task(jnp.sin, mesh_slice={"stage": 0})
        >>> with ignore_transforms():
        ...     float(first(0.0))
        0.0
    """
    check_callable(fun, "task")
    label = name or getattr(task, "name", None) or function_name(fun)
    explicit = ExplicitTask(_explicit_task(label, task, fields))
    component = _tasks.intern(explicit, _frozen(explicit))

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if config.current_settings().ignore_transforms:
            return fun(*args, **kwargs)
        if not transforms_act():
            _warn_once(label)
            return fun(*args, **kwargs)
        with jax.named_scope(component):
            return fun(*args, **kwargs)

    return wrapped


def _explicit_task(name: str, task: Task | None, fields: Mapping[str, Any]) -> Task:
    known = Task.__dataclass_fields__
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise MatchError(
            message(
                f"`task` of `{name}` has `{unknown[0]}=`, which is no field of `Task`.",
                ways=(f"use one of {', '.join(f'`{key}`' for key in known)}.",),
            )
        )
    if task is not None and fields:
        raise MatchError(
            message(
                f"`task` of `{name}` has both `task={task}` and `{next(iter(fields))}=`.",
                ways=("give `task=` alone.", "give the fields alone."),
            )
        )
    if task is not None and not isinstance(task, Task):
        raise MatchError(f"`task` of `{name}` has `task={task!r}`, which is no `Task`.")
    values = fields if task is None else {key: getattr(task, key) for key in known}
    return Task(**{**values, "name": name})


def _warn_once(name: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"Task `{name}` has no effect here: it is called outside `mjit`, `parallelize` and every "
        "MultiMesh or Context. Enter a context, or call it inside `mjit`.",
        stacklevel=3,
    )


def _frozen(value: Any) -> Any:
    """Returns a hashable form of a marker in which equal contents are equal.

    What can be neither hashed nor taken apart is told by identity; the table keeps it alive.
    """
    if isinstance(value, (str, bytes, int, float, type(None))):
        return (type(value).__name__, value)
    if isinstance(value, Mapping):
        return ("mapping", tuple((_frozen(k), _frozen(v)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return ("sequence", tuple(_frozen(item) for item in value))
    if isinstance(value, np.ndarray):
        return ("array", value.shape, tuple(_frozen(item) for item in value.flat))
    if isinstance(value, (Task, ExplicitTask, MicrobatchMarker)):
        items = (getattr(value, key) for key in value.__dataclass_fields__)
        return (type(value).__name__, tuple(_frozen(item) for item in items))
    try:
        hash(value)
    except TypeError:
        return ("identity", id(value))
    return value
