"""Settings, and the one value by which JAX's caches tell our contexts apart.

Settings are per thread and changed by context managers; two of them are set for the whole process.
Entering a context changes nothing of JAX but the value of `_CACHE_VALUE`, which is part of the key
of every `jax.jit` cache: what was traced under other contexts or settings is traced anew.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from multimesh._src.errors import ConfigError
from multimesh._src.schedule.make import check_name

_FUSION_MODES = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one thread.

    Attributes:
        autoshard: Names in sharding constraints are logical axes. On inside a `MultiMesh`.
        ignore_transforms: Every transform of ours is the identity: the program is plain JAX.
        enable_recomputation: Cheap results are computed again instead of sent to another submesh.
        enable_task_fusion: Whether neighbouring tasks are fused: "auto", "always" or "never". With
            "never" a microbatch loop on one submesh is also cut into the tasks that it names.
        only_fuse_loop_tasks: Tasks outside loops are never fused. No other tasks are fused so far.
        enable_fast_path: Programs that lie on one device set and match no task are plain JAX.
        schedule: The schedule of microbatch loops that name none. None: the default schedule.
        hoist_loop_invariants: What depends on loop constants alone is computed once, when it is not
            larger than its inputs.
        defer_grad_reduction: Whether data-parallel gradient reductions wait for the end of the
            loop: "auto", True or False. Without effect so far: they run in every microbatch.
        replicate_parameters_smaller_than_num_elements: Arrays of at most so many elements are
            replicated over the submeshes that use them.
        recompute_from_arguments_if_cost_less_than: Limit for recomputation, in element operations
            per shard.
    """

    autoshard: bool = False
    ignore_transforms: bool = False
    enable_recomputation: bool = True
    enable_task_fusion: str = "auto"
    only_fuse_loop_tasks: bool = False
    enable_fast_path: bool = True
    schedule: Any = None
    hoist_loop_invariants: bool = True
    defer_grad_reduction: bool | str = "auto"
    replicate_parameters_smaller_than_num_elements: int = 16
    recompute_from_arguments_if_cost_less_than: int = 1_048_576


@dataclass(frozen=True, slots=True)
class State:
    """What one thread has entered: its settings and its contexts, innermost first."""

    settings: Settings = Settings()
    contexts: tuple[Any, ...] = ()  # their `cache_key` changes with every registration


class _Thread(threading.local):
    state = State()


_thread = _Thread()
_process_settings: dict[str, int] = {}  # the two settings that hold for the whole process
# Made when this module is imported: making one is not thread-safe.
_CACHE_VALUE = jax.make_user_context(default_value=None)


def state() -> State:
    """Returns what this thread has entered."""
    return _thread.state


def current_settings() -> Settings:
    """Returns the settings that hold here."""
    return dataclasses.replace(_thread.state.settings, **_process_settings)


@contextlib.contextmanager
def entered(new: State) -> Iterator[None]:
    """Puts this thread into another state for the duration of a `with` block."""
    before = _thread.state
    holder = _CACHE_VALUE(_cache_value(new))
    with holder:
        _thread.state = new
        try:
            yield
        finally:
            _thread.state = before
    refresh_cache_value()


def refresh_cache_value() -> None:
    """Updates the value in JAX's cache keys after a registration in an entered context.

    Outside every context nothing is to be done: the value there is the process-wide one.
    """
    if _thread.state != State():
        _CACHE_VALUE(_cache_value(_thread.state)).__enter__()  # not left: `entered` restores


def set_process_cache_value(key: tuple[int, int] | None) -> None:
    """Sets the value that holds outside every context: the state of the default context."""
    _CACHE_VALUE.set_global(None if key is None else (key,))
    refresh_cache_value()


def _cache_value(state: State) -> Any:
    keys = tuple(context.cache_key for context in state.contexts)
    settings = dataclasses.replace(state.settings, **_process_settings)
    return (_CACHE_VALUE.get_global(), keys, settings)


def separate_caches(key: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it, in this thread, JAX finds no trace that it cached under another key."""
    return _CACHE_VALUE((_cache_value(_thread.state), key))


def changed(**settings: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager under which some settings of this thread differ."""
    return _changed(settings)


@contextlib.contextmanager
def _changed(settings: dict[str, Any]) -> Iterator[None]:
    before = _thread.state
    replaced = dataclasses.replace(before.settings, **settings)
    with entered(dataclasses.replace(before, settings=replaced)):
        yield


def autoshard(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Reads names in sharding constraints as logical axes. Always on inside a `MultiMesh`."""
    return context(autoshard=enable)


def ignore_transforms(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Makes every transform the identity: programs run as plain JAX."""
    return context(ignore_transforms=enable)


def enable_recomputation(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Allows to compute cheap results again instead of sending them to another submesh."""
    return context(enable_recomputation=enable)


def enable_task_fusion(mode: str | bool = "auto") -> contextlib.AbstractContextManager[None]:
    """Says whether neighbouring tasks are fused: `"auto"`, `"always"` or `"never"`."""
    return context(enable_task_fusion=mode)


def only_fuse_loop_tasks(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Forbids the fusion of tasks outside loops."""
    return context(only_fuse_loop_tasks=enable)


def enable_fast_path(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """Runs programs on one device set in which no task matched as plain JAX."""
    return context(enable_fast_path=enable)


def context(
    *,
    autoshard: bool | None = None,
    ignore_transforms: bool | None = None,
    enable_recomputation: bool | None = None,
    enable_task_fusion: str | bool | None = None,
    only_fuse_loop_tasks: bool | None = None,
    enable_fast_path: bool | None = None,
    schedule: Any = None,
    hoist_loop_invariants: bool | None = None,
    defer_grad_reduction: bool | str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Changes several settings at once, for this thread and the length of a `with` block.

    Settings that are not given keep their values. See `Settings` for what each means.

    Raises:
        ConfigError: A value that the setting does not have.
        ScheduleError: There is no such schedule.

    Example:
        >>> with context(schedule="gpipe", enable_task_fusion="never"):
        ...     pass
    """
    flags = {
        "autoshard": autoshard,
        "ignore_transforms": ignore_transforms,
        "enable_recomputation": enable_recomputation,
        "only_fuse_loop_tasks": only_fuse_loop_tasks,
        "enable_fast_path": enable_fast_path,
        "hoist_loop_invariants": hoist_loop_invariants,
    }
    changes: dict[str, Any] = {k: _flag(k, v) for k, v in flags.items() if v is not None}
    if enable_task_fusion is not None:
        changes["enable_task_fusion"] = _fusion_mode(enable_task_fusion)
    if schedule is not None:
        check_name(schedule)
        changes["schedule"] = schedule
    if defer_grad_reduction is not None:
        changes["defer_grad_reduction"] = _deferral(defer_grad_reduction)
    return changed(**changes)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"`{name}={value!r}`: it is either `True` or `False`.")
    return value


def _fusion_mode(mode: str | bool) -> str:
    if isinstance(mode, bool):
        return "always" if mode else "never"
    if mode not in _FUSION_MODES:
        raise ConfigError(f"`enable_task_fusion={mode!r}`: it is one of {_FUSION_MODES}.")
    return mode


def _deferral(value: bool | str) -> bool | str:
    if value != "auto" and not isinstance(value, bool):
        raise ConfigError(f"`defer_grad_reduction={value!r}`: it is `'auto'`, `True` or `False`.")
    return value


def replicate_parameters_smaller_than_num_elements(num_elements: int = 16) -> None:
    """Sets up to which size arrays are replicated over the submeshes that use them.

    Holds for the whole process. 0 replicates no array that has an element.
    """
    _set_process("replicate_parameters_smaller_than_num_elements", num_elements)


def recompute_from_arguments_if_cost_less_than(cost: int = 1_048_576) -> None:
    """Sets up to which cost, in element operations per shard, results are recomputed.

    Holds for the whole process. 0 recomputes nothing.
    """
    _set_process("recompute_from_arguments_if_cost_less_than", cost)


def _set_process(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"`{name}({value!r})`: it takes an integer of at least 0.")
    _process_settings[name] = value
    refresh_cache_value()
