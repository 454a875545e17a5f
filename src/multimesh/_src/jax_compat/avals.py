"""The types that JAX gives to arguments and closed-over arrays while we trace.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1.

An array on a mesh with Explicit axes carries its mesh and layout in its type. A program over
several submeshes cannot be traced so: types of different meshes do not mix, and contractions over
sharded dims raise. `clean_types` takes mesh and layout out of the types of all concrete arrays that
a trace meets, in this thread only. Arguments need no such help: they are traced from plain shapes.

Private names: `jax._src.core.pytype_aval_mappings` (the table from Python types to avals) with the
entries of `jax.Array` and typed keys; `jax._src.config.trace_context` (all that separates two
traces of one function) and `jax._src.config.use_simplified_jaxpr_constants`; `jax._src.util.cache`
(a cache that `jax.clear_caches` empties). Without them: closed-over arrays on Explicit meshes keep
their types, which JAX reports where they meet others; keys hold the process-wide configuration and
our own contexts; and `jax.clear_caches` leaves our caches alone.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractMesh

from multimesh._src import config as our_config
from multimesh._src.jax_compat import private

config: Any = None
core: Any = None
util: Any = None
_CLEANED: tuple[type, ...] = ()
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import config, core, util
        from jax._src.array import ArrayImpl
        from jax._src.random.prng import PRNGKeyArray

        _CLEANED = (ArrayImpl, PRNGKeyArray)

_ACTIVE = threading.local()  # .depth > 0 in threads that trace for us
_LOCK = threading.RLock()
_originals: dict[type, Callable[[Any], Any]] = {}
_users = 0


def trace_context() -> Hashable:
    """Returns JAX's own key of all settings under which a function is traced, ours included."""
    if config is not None:
        return config.trace_context()
    state = our_config.state()
    keys = tuple(context.cache_key for context in state.contexts)
    values = tuple(str(value) for _, value in sorted(jax.config.values.items()))
    return values, keys, our_config.current_settings()


def is_explicit(aval: Any) -> bool:
    """Whether an aval carries a mesh with Explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and bool(getattr(sharding.mesh, "explicit_axes", ()))


def names_a_place(aval: Any) -> bool:
    """Whether an aval carries a mesh with Explicit axes, or another memory than the default."""
    memory = getattr(aval, "memory_space", None)
    return is_explicit(aval) or getattr(memory, "name", "Device") == "Host"


def no_ambient_mesh() -> AbstractContextManager[Any]:
    """Within it no mesh of the user's `jax.set_mesh` is seen by traces."""
    try:
        return jax.set_mesh(None)
    except ValueError:  # not at the top level: only the abstract mesh can be changed
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), axis_types=()))


@contextlib.contextmanager
def arrays_as_consts() -> Iterator[None]:
    """Within it closed-over arrays become constants of a jaxpr, whatever the user's flag."""
    if config is None:
        yield
        return
    with config.use_simplified_jaxpr_constants(False):
        yield


@contextlib.contextmanager
def clean_types() -> Iterator[None]:
    """Within it, in this thread, types of concrete arrays carry no mesh, layout or memory."""
    _acquire()
    _ACTIVE.depth = getattr(_ACTIVE, "depth", 0) + 1
    try:
        yield
    finally:
        _ACTIVE.depth -= 1
        _release()


def _acquire() -> None:
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            for kind in _CLEANED:
                _originals[kind] = core.pytype_aval_mappings[kind]
                core.pytype_aval_mappings[kind] = _cleaner(_originals[kind])


def _release() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            if core is not None:
                core.pytype_aval_mappings.update(_originals)
            _originals.clear()


def _cleaner(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def aval_of(x: Any) -> Any:
        aval = original(x)
        if getattr(_ACTIVE, "depth", 0) and names_a_place(aval):
            return core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        return aval

    return aval_of


_epochs = itertools.count()


def _next_epoch() -> int:
    return next(_epochs) if util is not None else 0


if util is not None:
    _next_epoch = util.cache(max_size=1, trace_context_in_key=False)(_next_epoch)


def cache_epoch() -> int:
    """Returns a number that changes when `jax.clear_caches` is called."""
    return _next_epoch()
