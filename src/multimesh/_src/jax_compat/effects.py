"""Effects and callbacks: reading them, naming them, letting `jax.debug` run on several devices.

    debug_callback[effect=OrderedDebug callback=f] x    ->    io_callback[ordered=True callback=.] x

JAX lowers the ordered effects of `jax.debug.print` and `jax.debug.callback` for one device only,
those of `io_callback` for any number. So the first are traced as the second; `ordered_effects`
still tells them apart.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Private names: `jax._src.effects.ordered_effects`; the
primitives `debug_callback` and `debug_print` with their `impl`; the param `callback` of theirs and
of `io_callback`, and its `callback_func`. Without the first, effects are told by their names.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import io_callback
from jax.extend.core import JaxprEqn

from multimesh._src.errors import ExecutionError
from multimesh._src.jax_compat import jaxprs, private

effects: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import effects

_DEBUG = frozenset(("debug_callback", "debug_print"))
_CALLBACKS = frozenset(("debug_callback", "io_callback", "pure_callback"))


class _DebugCallback:
    """What an equation of `jax.debug` does, so that it can be told from an `io_callback`."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self._do: Any = eqn.primitive.impl
        self._params = dict(eqn.params)

    def __call__(self, *args: Any) -> None:
        self._do(*args, **self._params)


class _NamedCallback:
    """A callback that says in which task it failed, be it long after the task was called."""

    def __init__(self, callback: Callable[..., Any], task: str) -> None:
        self.callback_func = getattr(callback, "callback_func", None)
        self._callback = callback
        self._task = task

    def __call__(self, *args: Any) -> Any:
        try:
            return self._callback(*args)
        except Exception as error:
            what = f"a Python callback inside it raised `{type(error).__name__}: {error}`."
            raise ExecutionError(f"The task `{self._task}` failed: {what}") from error


def name_callbacks(eqn: JaxprEqn, task: str) -> JaxprEqn:
    """Returns an equation whose Python callback, if it has one, names the task where it fails."""
    callback = eqn.params.get("callback")
    if not callable(callback) or eqn.primitive.name not in _CALLBACKS:
        return eqn
    return eqn.replace(params={**eqn.params, "callback": _NamedCallback(callback, task)})


def ordered_effects(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[str, JaxprEqn]]:
    """Yields every equation with an ordered effect, at any depth, and whose effect it is."""
    for eqn in eqns:
        if not _is_ordered(eqn):
            continue
        inner = jaxprs.sub_jaxprs(eqn.params)
        for jaxpr in inner:
            yield from ordered_effects(jaxprs.open_jaxpr(jaxpr).eqns)
        if not inner:
            yield _kind(eqn), eqn


def _is_ordered(eqn: JaxprEqn) -> bool:
    return any(
        type(effect).__name__.startswith("Ordered")
        if effects is None
        else effects.ordered_effects.contains(effect)
        for effect in eqn.effects
    )


def _kind(eqn: JaxprEqn) -> str:
    callback = eqn.params.get("callback")
    if isinstance(getattr(callback, "callback_func", None), _DebugCallback):
        return "jax.debug"
    return eqn.primitive.name


def on_any_devices(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation that may run on several devices in place of one that may not."""
    if eqn.primitive.name not in _DEBUG or not _is_ordered(eqn):
        return eqn
    callback = _DebugCallback(eqn)

    def call(*args: Any) -> Any:
        return io_callback(callback, None, *args, ordered=True)

    traced = jax.make_jaxpr(call)(*(atom.aval for atom in eqn.invars))
    (made,) = jaxprs.open_jaxpr(traced).eqns
    return eqn.replace(primitive=made.primitive, params=made.params, effects=made.effects)


def calls_host(eqn: JaxprEqn) -> bool:
    """Whether an equation has an effect or calls a Python function, at any depth."""
    if eqn.effects or eqn.primitive.name == "pure_callback":
        return True
    return any(
        calls_host(inner)
        for jaxpr in jaxprs.sub_jaxprs(eqn.params)
        for inner in jaxprs.open_jaxpr(jaxpr).eqns
    )
