"""Ordered effects: reading them, and letting `jax.debug` run on several devices.

    debug_callback[effect=OrderedDebug callback=f] x     ->    io_callback[ordered=True callback=f] x

JAX lowers the ordered effects of `jax.debug.print` and `jax.debug.callback` for one device only,
those of `io_callback` for any number. So the first are traced as the second; `ordered_effects`
still tells them apart.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Private names: `jax._src.effects.ordered_effects`; the
params `callback` and `effect` of `debug_callback`; `callback.callback_func` of `io_callback`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import effects
from jax.experimental import io_callback
from jax.extend.core import JaxprEqn

from multimesh._src.jax_compat import jaxprs


class _DebugCallback:
    """A callback of `jax.debug`, so that it can be told from one of `io_callback`."""

    def __init__(self, callback: Callable[..., Any]) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        self._callback(*args)


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
    return bool(eqn.effects) and any(map(effects.ordered_effects.contains, eqn.effects))


def _kind(eqn: JaxprEqn) -> str:
    callback = eqn.params.get("callback")
    if isinstance(getattr(callback, "callback_func", None), _DebugCallback):
        return "jax.debug"
    return eqn.primitive.name


def on_any_devices(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation that may run on several devices in place of one that may not."""
    if eqn.primitive.name != "debug_callback" or not _is_ordered(eqn):
        return eqn
    callback = _DebugCallback(eqn.params["callback"])

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
