"""`record` and `measure`: calls of a step into a `Timeline`; `passes`: what every pass made of it.

with record() as timeline:            the calls in this block, as they are
    state, loss = step(state, batch)

timeline = measure(step, state, batch)    several calls with the same arguments, and each run
                                          by itself
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from multimesh._src.errors import ConfigError
from multimesh._src.partition.pipeline import partition
from multimesh._src.report.timeline.timeline import Recorder, Timeline
from multimesh._src.runtime.timing import recording
from multimesh._src.staging.mjit import MultiMeshFunction, mjit
from multimesh._src.staging.staged import Compiled, Lowered, Traced


@contextmanager
def record(*, alone: bool = False) -> Iterator[Timeline]:
    """Measures all calls of steps in a `with` block, made in this thread.

    Every run and copy of a call gets a start and an end, and the call is waited for before it
    returns: the host does not run ahead into the next step, as it otherwise does. A start is the
    earliest possible one: when the devices were free, the inputs there and the host enqueueing. An
    end is seen by a thread that waits for it, late by its wake-up: some 0.05 ms, more where devices
    share processors with it, as CPU devices do. So runs of less than about 0.2 ms are not measured
    well, and a call takes longer by some 10 us a run on the host. Outside of the block nothing is
    slower. To measure, do not let a call compile: make one before.

    Args:
        alone: Whether to wait for each run and copy before the next one. Times are then those of
            the run by itself, and nothing overlaps.

    Yields:
        The timeline, to which every call is added when it ends.

    Example:
        >>> import jax.numpy as jnp
        >>> def double(x):
        ...     with jax.named_scope("double"):
        ...         return x * 2
        >>> with Context() as context:
        ...     context.register_task("double", task=Task(mesh=jax.make_mesh((1,), ("x",))))
        ...     step = mjit(double)
        >>> with record() as timeline:
        ...     result = step(jnp.ones(4))
        >>> [(event.label, event.kind) for event in timeline.call.runs]
        [('double', 'F')]
    """
    timeline = Timeline()
    with recording(Recorder(timeline, alone)):
        yield timeline


def measure(
    step: Callable[..., Any],
    *args: Any,
    num_steps: int = 5,
    alone: bool = True,
    **kwargs: Any,
) -> Timeline:
    """Calls a step several times with the same arguments and measures it as `record` does.

    The first call is not measured: it compiles. Arguments that the step donates are copied before
    each call, so they can be used afterwards; give them as a training loop has them, which is as
    the step returned them.

    Args:
        step: A function of `mjit` or `parallelize`, a `jax.jit` inside a context, or any function
            that calls such steps.
        *args: Its arguments.
        num_steps: How many calls to measure as they always run.
        alone: Whether to measure as many calls in which each run is waited for, for the times of
            the runs by themselves.
        **kwargs: Its arguments by name.

    Raises:
        ConfigError: `num_steps` is no positive number.
        DebugError: No step of MultiMesh ran.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ConfigError(f"`measure(num_steps={num_steps!r})`: it is an integer of at least 1.")
    leaves, tree = jax.tree.flatten((args, kwargs))
    copies = [_copied(leaf) for leaf in leaves]
    _call(step, tree, copies)
    donated = [_is_deleted(leaf) for leaf in copies]
    del copies

    timeline = Timeline()
    recorder = Recorder(timeline, alone=False)
    with recording(recorder):
        # in turns, so that what else the machine does is in both
        for recorder.alone in ((True, False) if alone else (False,)) * num_steps:
            given = zip(leaves, donated, strict=True)
            _call(step, tree, [_copied(leaf) if gone else leaf for leaf, gone in given])
    timeline.call  # noqa: B018 - raises where nothing was recorded
    return timeline


def _call(step: Callable[..., Any], tree: Any, leaves: list[Any]) -> None:
    args, kwargs = jax.tree.unflatten(tree, leaves)
    jax.block_until_ready(leaves)
    jax.block_until_ready(step(*args, **kwargs))


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def passes(fun: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Returns the text of the program after every pass, as `MULTIMESH_DUMP` writes it.

    Args:
        fun: A function, a function of `mjit`, or what its `trace`, `lower` or `compile` gave.
        *args: The arguments of a function; they may be `jax.ShapeDtypeStruct`s.
        **kwargs: Its arguments by name.

    Returns:
        The text by the name of the pass, in order: `print(passes(step, state, batch)["split"])`
        shows the tasks.

    Raises:
        MultiMeshError: A subclass that says what in the program cannot be done.
    """
    if isinstance(fun, Compiled):
        fun = fun._lowered
    if not isinstance(fun, (Traced, Lowered)):
        function = fun if isinstance(fun, MultiMeshFunction) else mjit(fun)
        fun = function.trace(*args, **kwargs)
    found: dict[str, str] = {}
    partition(fun._traced, found.__setitem__)
    return found
