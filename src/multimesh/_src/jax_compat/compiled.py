"""The cheapest safe way to call a `jax.stages.Compiled`, and what may be asked of an array.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1.

`Compiled.__call__` looks up a signature made of the type, sharding and layout of every argument on
each call. Where the caller knows that its arguments fit, the loaded executable can be called at
once: 20 % less host time at 150 arguments. That path is taken only for executables without
tokens, callbacks, references, dropped arguments, embedded constants or unusual layouts; every other
one, and every one on a JAX whose internals differ, is called the public way.

`watched_call` goes the same path and asks the runtime for a token too: it says when a program has
run, also when all its results have been donated since and cannot be waited for any more.

`ArrayImpl` is the concrete class of ordinary arrays, None where JAX has moved it.

Private names: `Compiled._executable` with `xla_executable`, `unsafe_call`, the attributes read in
`_is_plain` and the tokens of results; `Compiled._params.const_args`; `PRNGKeyArray._base_array`;
`Array._pjrt_layout`; the local values of `jax._src.config` states.
"""

import contextlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import jax

from multimesh._src.jax_compat import private

config: Any = None
ArrayImpl: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import config
    with contextlib.suppress(ImportError):
        from jax._src.array import ArrayImpl

FlatCall: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
Wait: TypeAlias = Callable[[], object]
WatchedCall: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Wait]]

_PLAIN_FLAGS = ("ordered_effects", "has_unordered_effects", "has_host_callbacks", "mut")


def flat_call(compiled: jax.stages.Compiled, in_dtypes: Sequence[Any]) -> FlatCall:
    """Returns a function from a sequence of arguments to the sequence of results.

    The arguments must be arrays of the shapes, dtypes and shardings compiled for; nothing is
    checked. `compiled` must come from a function of positional arrays with a list of results.
    """
    try:
        call = _direct_call(compiled, in_dtypes) if private.ALLOWED else None
    except AttributeError:
        call = None
    return call or (lambda args: compiled(*args))


def watched_call(compiled: jax.stages.Compiled, in_dtypes: Sequence[Any]) -> WatchedCall | None:
    """Returns `flat_call` with a second result: a function that waits until the program has run.

    None where the runtime gives no token; then the results themselves have to be waited for.
    """
    try:
        parts = _direct_parts(compiled, in_dtypes) if private.ALLOWED else None
    except AttributeError:
        return None
    if parts is None:
        return None
    execute, handlers, physical = parts
    if "with_tokens" not in (execute.__doc__ or ""):
        return None

    def call(args: Sequence[Any]) -> tuple[Sequence[Any], Wait]:
        made = execute(physical(args), with_tokens=True)
        token = made.consume_token()
        return made.consume_with_handlers(handlers), token.block_until_ready

    return call


def _direct_call(compiled: Any, in_dtypes: Sequence[Any]) -> FlatCall | None:
    parts = _direct_parts(compiled, in_dtypes)
    if parts is None:
        return None
    execute, handlers, physical = parts

    def call(args: Sequence[Any]) -> Sequence[Any]:
        return execute(args).consume_with_handlers(handlers)

    def call_with_keys(args: Sequence[Any]) -> Sequence[Any]:
        return execute(physical(args)).consume_with_handlers(handlers)

    has_keys = any(map(_is_key, in_dtypes))
    return call_with_keys if has_keys else call


def _direct_parts(compiled: Any, in_dtypes: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """The loaded program, the handlers of its results, and what turns typed keys to integers."""
    executable = compiled._executable
    unsafe_call = executable.unsafe_call
    if compiled._params.const_args or not _is_plain(executable, unsafe_call, len(in_dtypes)):
        return None
    keys = tuple(i for i, dtype in enumerate(in_dtypes) if _is_key(dtype))

    def physical(args: Sequence[Any]) -> Sequence[Any]:
        if not keys:
            return args
        args = list(args)
        for i in keys:
            args[i] = args[i]._base_array
        return args

    execute = executable.xla_executable.execute_sharded
    return execute, unsafe_call.out_handler.handlers, physical


def _is_key(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _is_plain(executable: Any, unsafe_call: Any, num_args: int) -> bool:
    if any(getattr(unsafe_call, flag) for flag in _PLAIN_FLAGS):
        return False
    if unsafe_call.pgle_profiler is not None or executable._mut:
        return False
    dispatch_layouts = executable._dispatch_in_layouts
    return (
        set(unsafe_call.kept_var_idx) == set(range(num_args))
        and len(dispatch_layouts) == num_args
        and all(layout is None for layout in dispatch_layouts)
    )


def layout_getter() -> Callable[[Any], Any]:
    """Returns a cheap function from an undeleted array to an object that stands for its layout.

    Equal layouts of equal types give the same object. (Asking a deleted array crashes the process
    on 0.10.2.) Without JAX's internals every array gives None, and unusual layouts are then for
    `Compiled` to notice.
    """
    has_layout = hasattr(ArrayImpl, "_pjrt_layout")
    return attrgetter("_pjrt_layout") if has_layout else lambda _: None


def local_settings() -> Callable[[], None]:
    """Returns a function that gives another thread the JAX settings local to this one.

    (`with jax.log_compiles():` and the like hold in one thread only.)
    """
    states = getattr(getattr(config, "config", None), "_value_holders", {}).values()
    unset = getattr(getattr(config, "config_ext", None), "unset", None)
    local = [
        (state, value)
        for state in states
        if hasattr(state, "set_local") and (value := state.get_local()) is not unset
    ]

    def apply() -> None:
        for state, value in local:
            state.set_local(value)

    return apply
