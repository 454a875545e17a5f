"""Plain `jax.jit` inside a context does what `mjit` does, so that no code needs an edit.

    with multi_mesh:
        state = jax.jit(step)(state, batch)     # as mjit(step)(state, batch)
        norm = jax.jit(optax.tree.norm)(grads)  # no scope, but grads lie on several submeshes

`jax_compat.jit_calls` asks the server for every call that JAX's own cache does not know. What is
plain JAX (R15) goes back to it and is as fast as ever; so do calls inside of a trace, and calls of
JAX's own functions whose arguments lie together.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import jax

from multimesh._src import config
from multimesh._src.frontend.arguments import argument_spec, function_name
from multimesh._src.jax_compat import jit_calls, jit_hook
from multimesh._src.jax_compat.jit_calls import NOT_SERVED
from multimesh._src.staging.binding import Binding
from multimesh._src.staging.maker import Maker
from multimesh._src.staging.mjit import MultiMeshFunction
from multimesh._src.staging.variants import device_sets


def serve_jit() -> None:
    """Serves plain `jax.jit` functions inside contexts from now on, where this JAX is known."""
    jit_calls.install(JitServer())


class JitServer:
    """Serves plain `jax.jit` functions by `mjit` functions, one for each, as long as they live."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, Any], MultiMeshFunction] = {}
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        """Whether calls made here are inside a context, and not inside a trace."""
        state = config.state()
        inside = bool(state.contexts) and not state.settings.ignore_transforms
        return inside and not jit_hook.under_jit()

    def call(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        from_jax: bool,
    ) -> Any:
        """Returns the results of a call, or NOT_SERVED where it is plain JAX."""
        if from_jax and not _lie_apart((args, kwargs)):
            return NOT_SERVED
        return self._function(fun, options).call_unless_plain(args, kwargs)

    def trace(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Returns the traced function, or NOT_SERVED where it is plain JAX."""
        return self._function(fun, options).trace_unless_plain(args, kwargs)

    def _function(self, fun: Callable[..., Any], options: Mapping[str, Any]) -> MultiMeshFunction:
        # Functions may be unhashable; two jits of one function differ by their options.
        key = (id(fun), _hashable(options))
        with self._lock:
            if key not in self._functions:
                self._functions[key] = _served(_weakly(fun), fun, options)
                weakref.finalize(fun, self._functions.pop, key, None)
            return self._functions[key]


def _lie_apart(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return not any(map(jit_hook.is_tracer, leaves)) and len(device_sets(leaves)) > 1


def _hashable(options: Mapping[str, Any]) -> Any:
    flat, tree = jax.tree.flatten(dict(options), is_leaf=lambda x: x is None)
    return tree, tuple(flat)


def _weakly(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `fun` without keeping it alive: its own caller does."""
    reference = weakref.ref(fun)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        return alive(*args, **kwargs)

    call.__name__ = call.__qualname__ = function_name(fun)
    if isinstance(fun, FunctionType):
        call.__wrapped__ = _shadow(fun)  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _shadow(fun: FunctionType) -> FunctionType:
    """A function of the same name, file, line and parameters that holds nothing.

    JAX reads these in its errors.
    """
    return FunctionType(fun.__code__.replace(co_freevars=()), {}, fun.__name__)


def _served(
    weak: Callable[..., Any], fun: Callable[..., Any], options: Mapping[str, Any]
) -> MultiMeshFunction:
    named = {key: value for key, value in options.items() if "arg" in key}
    maker = Maker(
        fun=weak,
        spec=argument_spec(fun, **named),
        options={**named, "keep_unused": options["keep_unused"]},
        in_shardings=options["in_shardings"],
        out_shardings=options["out_shardings"],
        binding=Binding(function_name(fun), None, None, None),
        is_served=True,
    )
    return MultiMeshFunction(maker)
