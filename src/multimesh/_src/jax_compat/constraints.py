"""Sharding constraints of JAX itself: calling them, reading them, and taking them over.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1 and flax 0.12.

While we trace, `jax.lax.with_sharding_constraint` must mean ours. Programs hold that function under
many names (`from jax.lax import with_sharding_constraint`, `jax.experimental.pjit`, Flax), so no
attribute is patched: the function object itself gets the code of a short jump to a dispatcher,
which goes to the replacement in threads that trace for us and to the original code in all others.
The last thread to leave puts the code back. The same is done to two functions of Flax, if loaded:
`global_mesh_defined` (without a mesh Flax drops every constraint) and `with_logical_constraint`
(without rules it drops the names).

Private names: `jax._src.pjit.sharding_constraint_p`; the code of
`jax.lax.with_sharding_constraint`. Where that function is not a plain Python function, nothing is
taken over: programs then need `multimesh.jax.with_sharding_constraint`.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
from jax._src.pjit import sharding_constraint_p
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.jax_compat import placements

# What we bind for the user carries the user's line, not ours.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))

_ACTIVE = threading.local()  # .replacement: set in threads that trace for us
_LOCK = threading.RLock()
_taken: dict[FunctionType, CodeType] = {}  # functions taken over now, with their own code
_users = 0


def constrain(x: Any, sharding: NamedSharding) -> Any:
    """Applies JAX's own constraint to one array, also while it is taken over.

    Inside `shard_map` axes in manual mode are dropped from the constraint: there the array is the
    piece of one device along them. `sharding` is otherwise on a mesh with Auto axes.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        # A mesh set by the user must change nothing.
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            return call_original(x, sharding)
    if set(manual) >= set(sharding.mesh.axis_names):
        return x
    spec = PartitionSpec(*(_without(entry, manual) for entry in sharding.spec))
    return call_original(x, spec)


def _without(entry: Any, manual: tuple[str, ...]) -> Any:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name not in manual) or None


def call_original(x: Any, shardings: Any) -> Any:
    """Calls `jax.lax.with_sharding_constraint` as JAX means it, whether taken over or not."""
    with _replacement(None):
        return jax.lax.with_sharding_constraint(x, shardings)


def sharding_of_constraint(eqn: JaxprEqn) -> Any:
    """Returns the sharding of one of JAX's own constraint equations; None for other equations."""
    if eqn.primitive is not sharding_constraint_p:
        return None
    return eqn.params["sharding"]


def is_redirected() -> bool:
    """Whether this thread is inside `redirect_constraints`, that is, traces for us."""
    return _current() is not None


def _current() -> Callable[[Any, Any], Any] | None:
    return getattr(_ACTIVE, "replacement", None)


@contextlib.contextmanager
def _replacement(function: Callable[[Any, Any], Any] | None) -> Iterator[None]:
    before = _current()
    _ACTIVE.replacement = function
    try:
        yield
    finally:
        _ACTIVE.replacement = before


@contextlib.contextmanager
def redirect_constraints(replacement: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Within it, in this thread, `jax.lax.with_sharding_constraint` is `replacement`.

    Args:
        replacement: Called with the pytree and the (prefix) pytree of shardings or specs.
    """
    _acquire()
    try:
        with _replacement(replacement):
            yield
    finally:
        _release()


def _acquire() -> None:
    global _users
    with _LOCK:
        _users += 1
        _take(jax.lax.with_sharding_constraint, _constraint_dispatcher)
        _take(jax.device_put, placements.device_put_dispatcher)
        _take(jax.sharding.reshard, placements.reshard_dispatcher)
        if (meta := sys.modules.get("flax.core.meta")) is not None:
            _take(meta.global_mesh_defined, _mesh_defined_dispatcher)
        if (spmd := sys.modules.get("flax.linen.spmd")) is not None:
            _take(spmd.with_logical_constraint, _logical_dispatcher)


def _release() -> None:
    global _users
    with _LOCK:
        _users -= 1
        if _users == 0:
            for function, code in _taken.items():
                function.__code__ = code
            _taken.clear()


def _take(function: Any, make_dispatcher: Callable[[FunctionType], Callable[..., Any]]) -> None:
    """Makes calls of `function` go to `make_dispatcher(original)` until the last `_release`."""
    if not isinstance(function, FunctionType) or function.__closure__ or function in _taken:
        return
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    # The jump runs with the globals of the function's own module, so its target is put there. It
    # stays: another thread may be about to jump when the code is put back.
    name = f"_multimesh_{function.__name__}"
    function.__globals__[name] = make_dispatcher(original)
    _taken[function] = function.__code__
    code = _jump.__code__
    renamed = tuple(name if old == "_target" else old for old in code.co_names)
    function.__code__ = code.replace(co_names=renamed)


def _jump(*args: Any, **kwargs: Any) -> Any:
    # Only the code is used, with the name replaced.
    return _target(*args, **kwargs)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


def _constraint_dispatcher(original: FunctionType) -> Callable[..., Any]:
    def with_sharding_constraint(x: Any, shardings: Any) -> Any:
        replacement = _current()
        return original(x, shardings) if replacement is None else replacement(x, shardings)

    return with_sharding_constraint


def _mesh_defined_dispatcher(original: FunctionType) -> Callable[..., Any]:
    def global_mesh_defined() -> bool:
        return is_redirected() or original()

    return global_mesh_defined


def _logical_dispatcher(original: FunctionType) -> Callable[..., Any]:
    def with_logical_constraint(
        x: Any, logical_axis_resources: Any, rules: Any = None, mesh: Any = None, **options: Any
    ) -> Any:
        replacement = _current()
        has_rules = rules or original.__globals__["get_logical_axis_rules"]()
        if replacement is None or has_rules or logical_axis_resources is None or mesh is not None:
            return original(x, logical_axis_resources, rules, mesh, **options)
        specs = jax.tree.map(_as_spec, logical_axis_resources, is_leaf=_is_logical_spec)
        return replacement(x, specs)

    return with_logical_constraint


def _is_logical_spec(value: Any) -> bool:
    """Whether Flax takes `value` as the names of one array: a spec or a flat tuple of names."""
    if isinstance(value, PartitionSpec):
        return True
    unconstrained = PartitionSpec.UNCONSTRAINED
    return isinstance(value, tuple) and all(
        item is None or item is unconstrained or isinstance(item, str) for item in value
    )


def _as_spec(names: Any) -> PartitionSpec:
    return PartitionSpec(*names)
