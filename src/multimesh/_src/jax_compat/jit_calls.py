"""Calls of plain `jax.jit` functions that somebody else may serve.

    with multi_mesh:
        step(state, batch)        # step = jax.jit(f)
    ->  server.call(f, {"donate_argnums": ...}, (state, batch), {})

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1.

A call that JAX's C++ cache does not know asks two Python functions, one to trace and one to run.
Both are replaced: where the server serves the call, nothing is traced by JAX and nothing is put
into the C++ cache; else JAX goes on as ever, and later calls are as fast as ever. The same holds
for `.trace`, `.lower` and `.eval_shape`. Functions of JAX itself (`jax.numpy`, single primitives)
are offered to the server with `from_jax`.

Private names: `jax._src.pjit._infer_params`, `_run_python_pjit`, `jit_trace` and the attributes of
what `jax.jit` returns. On a JAX where these are not what they were, nothing is replaced.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, SimpleNamespace
from typing import Any, Protocol

import jax

from multimesh._src.jax_compat import private

pjit: Any = None
UNSPECIFIED: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import pjit
        from jax._src.sharding_impls import UNSPECIFIED

NOT_SERVED = object()
"""What a server returns for calls that it leaves to JAX."""

_PARAMETERS = {
    "_infer_params": ["fun", "ji", "args", "kwargs"],
    "_run_python_pjit": ["p", "args_flat", "fun", "args", "kwargs"],
    "jit_trace": ["jit_func", "args", "kwargs"],
}
_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused")
_BETWEEN = (__name__, "jax._src.pjit", "jax._src.traceback_util")
_LOCK = threading.Lock()


class Server(Protocol):
    """Serves calls of plain `jax.jit` functions. Options are keyword arguments of `jax.jit`."""

    def is_active(self) -> bool:
        """Whether it wants to see the calls that are made here, in this thread."""
        ...

    def call(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        from_jax: bool,
    ) -> Any:
        """Returns the results of a call, or NOT_SERVED."""
        ...

    def trace(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Returns a staged form like `jax.stages.Traced`, or NOT_SERVED."""
        ...


class _Thread(threading.local):
    unserved = False


_thread = _Thread()
_server: Server | None = None


@contextlib.contextmanager
def unserved() -> Iterator[None]:
    """Within it, in this thread, every call is JAX's own."""
    before = _thread.unserved
    _thread.unserved = True
    try:
        yield
    finally:
        _thread.unserved = before


@functools.cache
def is_available() -> bool:
    """Whether this JAX has the functions that this module replaces."""
    if pjit is None:
        return False
    for name, parameters in _PARAMETERS.items():
        function = getattr(pjit, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return False
    asked = {name for code in _nested(pjit._cpp_pjit.__code__) for name in code.co_names}
    return {"_infer_params", "_run_python_pjit"} <= asked


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def install(server: Server) -> None:
    """Offers every call to `server` from now on. Does nothing the second time."""
    global _server
    with _LOCK:
        if _server is None and is_available():
            _replace(server)
            _server = server


class _Served:
    """Stands for the parameters of a call that was served."""

    def __init__(self, results: Any):
        self.results = results


_NO_JAXPR = SimpleNamespace(effects=(), consts=())


def _replace(server: Server) -> None:
    infer, run, trace = pjit._infer_params, pjit._run_python_pjit, pjit.jit_trace

    def is_offered(fun: Any) -> bool:
        return not _thread.unserved and not _is_of(fun, "multimesh") and server.is_active()

    @functools.wraps(infer)
    def infer_params(
        fun: Callable[..., Any], ji: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        results = NOT_SERVED
        if is_offered(fun) and (options := _options(ji)) is not None:
            from_jax = _is_of(fun, "jax")
            results = server.call(fun, options, args, kwargs, from_jax=from_jax)
        if results is not NOT_SERVED:
            return _Served(results), []
        return infer(fun, ji, args, kwargs)

    @functools.wraps(run)
    def run_python_pjit(p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        if type(p) is _Served:
            return p.results, [], None, [], _NO_JAXPR, None, None, ()
        return run(p, args_flat, fun, args, kwargs)

    @functools.wraps(trace)
    def jit_trace(jit_func: Any, *args: Any, **kwargs: Any) -> Any:
        fun, traced = jit_func._fun, NOT_SERVED
        offered = is_offered(fun) and not _is_of(fun, "jax") and not _asked_by_jax()
        if offered and (options := _options(jit_func._jit_info)) is not None:
            traced = server.trace(fun, options, args, kwargs)
        if traced is not NOT_SERVED:
            return traced
        with unserved():
            return trace(jit_func, *args, **kwargs)

    pjit._infer_params, pjit._run_python_pjit = infer_params, run_python_pjit
    pjit.jit_trace = jit_trace
    # Every `jax.jit` puts the methods of its module on the one class of all such functions.
    type(jax.jit(lambda: None)).trace = jit_trace  # pyright: ignore[reportAttributeAccessIssue]


def _asked_by_jax() -> bool:
    """Whether a function of JAX stages another one: `make_jaxpr` and `export` need JAX's form."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("jax.")


def _is_of(fun: Any, package: str) -> bool:
    while isinstance(fun, functools.partial):
        fun = fun.func
    module = getattr(fun, "__module__", None) or ""
    return module == package or module.startswith(package + ".")


def _options(ji: Any) -> dict[str, Any] | None:
    """The options of a jit function; None if it has some that only JAX knows."""
    layouts = (*ji.in_layouts_leaves, *ji.out_layouts_leaves)
    if ji.device is not None or ji.backend is not None or any(x is not None for x in layouts):
        return None
    options = {name: getattr(ji, name) for name in _OPTIONS}
    for side in ("in_shardings", "out_shardings"):
        leaves = getattr(ji, f"{side}_leaves")
        given = [None if leaf is UNSPECIFIED else leaf for leaf in leaves]
        tree = getattr(ji, f"{side}_treedef")
        everywhere = all(leaf is None for leaf in given)
        options[side] = None if everywhere else jax.tree.unflatten(tree, given)
    return options
