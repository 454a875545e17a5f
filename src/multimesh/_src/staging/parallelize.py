"""`parallelize`: compiles a model first and makes its parameters where it wants them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multimesh._src import config
from multimesh._src.errors import TraceError, message
from multimesh._src.frontend.arguments import check_callable
from multimesh._src.frontend.contexts import active_contexts
from multimesh._src.staging.in_place import in_place, maker, shapes_of
from multimesh._src.staging.staged import Compiled


def parallelize(
    fun: Callable[..., Any],
    *,
    init_params: Callable[[], Any] | None = None,
    get_input_batch: Callable[[], Any] | None = None,
    initial_batch: Any = None,
    devices: Sequence[Any] | None = None,
) -> tuple[Any, ...]:
    """Compiles `fun(params, batch)` and gives functions that make its arguments in place.

    The layouts and submeshes of parameters and batch come out of the model: its tasks and
    constraints. The compiled model is bound to the contexts that are active here.

    Args:
        fun: The model or step.
        init_params: Makes the parameters; called without arguments, only traced here.
        get_input_batch: Makes a batch; called without arguments, only traced here.
        initial_batch: A batch, instead of `get_input_batch`; where it lies is kept.
        devices: What `TaskMesh` numbers index, and, outside of a MultiMesh, where a model without
            tasks runs. Default: `jax.devices()`.

    Returns:
        `(compiled, init, get_batch)`, or `(compiled, init)` with `initial_batch`. `init` and
        `get_batch` make their arrays where the model takes them: no device holds what it does not
        own.

    Raises:
        TraceError: There is no `init_params`, or neither or both sources of batches.

    Example:
        >>> import jax.numpy as jnp
        >>> model, init, get_batch = parallelize(
        ...     jnp.dot, init_params=lambda: jnp.ones(4), get_input_batch=lambda: jnp.ones(4)
        ... )
        >>> float(model(init(), get_batch()))
        4.0
    """
    check_callable(fun, "parallelize")
    _check_sources(init_params, get_input_batch, initial_batch)
    assert init_params is not None
    params = shapes_of(init_params)
    batch = initial_batch if get_input_batch is None else shapes_of(get_input_batch)
    compiled = _compile(fun, params, batch, devices)
    places = compiled.input_shardings[0]
    init = in_place(init_params, params, places[0])
    if get_input_batch is None:
        return compiled, init
    return compiled, init, in_place(get_input_batch, batch, places[1])


def _check_sources(init_params: Any, get_input_batch: Any, initial_batch: Any) -> None:
    if init_params is None:
        raise TraceError(
            message(
                "`parallelize` needs `init_params`, which says what the parameters look like.",
                ways=("give `init_params=`, a function without arguments.",),
            )
        )
    check_callable(init_params, "parallelize(init_params=)")
    if get_input_batch is not None:
        check_callable(get_input_batch, "parallelize(get_input_batch=)")
    if (get_input_batch is None) == (initial_batch is None):
        given = "neither" if get_input_batch is None else "both"
        raise TraceError(
            message(
                f"`parallelize` got {given} of `get_input_batch` and `initial_batch`.",
                ways=(
                    "give `get_input_batch=`, a function without arguments that makes a batch.",
                    "give `initial_batch=`, a batch.",
                ),
            )
        )


def _compile(
    fun: Callable[..., Any], params: Any, batch: Any, devices: Sequence[Any] | None
) -> Compiled:
    """Compiles the model; without tasks and MultiMesh it runs on all devices, on an axis `x`."""
    with config.autoshard(True):
        made = maker(fun, devices=devices, always_ours=True)
        traced = made.trace(made.call((params, batch), {}))
        if active_contexts().global_mesh is None and not traced.says_where:
            chosen = devices if devices is not None else jax.devices()
            mesh = Mesh(np.array(chosen), ("x",))
            made = maker(fun, devices=devices, mesh=mesh, always_ours=True)
            traced = made.trace(made.call((params, batch), {}))
        return traced.lower().compile()
