"""Jit equations that we run: how an `mjit` function lives through eager transformations.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1.

`jax.grad(step)(state, batch)` outside of any jit pulls `step` through autodiff and then runs what
comes out, one jit equation after another, eagerly. `bind` puts an ordinary jit equation in the
place of an `mjit` call; its `name` parameter is a `BoundName`, a string that also knows who runs
the equation. JVP, linearization, partial evaluation, transposition, batching and remat all hand the
name on unchanged to the equations that they make, so each of them comes back to us when JAX runs
it. Jit equations with a plain name go JAX's own way, and so does a `BoundName` inside a plain
`jax.jit`: there it is just a name.

Private names: `jax._src.pjit.jit_p`, its `impl` and its parameters; `UNSPECIFIED`;
`jax._src.core.trace_state_clean`; `_consts` of `jax.stages.Traced`. On a JAX where these are not
what they were, `is_available()` is False and `bind` raises.
"""

import contextlib
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from multimesh._src.errors import TraceError, message
from multimesh._src.jax_compat import private

jit_p: Any = None
core: Any = None
UNSPECIFIED: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):
        from jax._src import core
        from jax._src.pjit import jit_p
        from jax._src.sharding_impls import UNSPECIFIED

_PARAMETERS = frozenset(
    (
        *("jaxpr", "in_shardings", "out_shardings", "in_layouts", "out_layouts"),
        *("donated_invars", "ctx_mesh", "name", "keep_unused", "inline", "compiler_options_kvs"),
    )
)
_EMPTY_MESH = Mesh(np.empty((), dtype=object), ())
_LOCK = threading.Lock()
_jax_impl: Any = getattr(jit_p, "impl", None)
_top_level = jex_core.get_opaque_trace_state(convention="nnx")
_installed = False


class Runner(Protocol):
    """Runs the equations that carry its name."""

    def run_equation(
        self, jaxpr: ClosedJaxpr, args: Sequence[Any], donated: tuple[bool, ...]
    ) -> Sequence[Any] | None:
        """Runs `jaxpr` on concrete `args` and returns its flat results; None leaves it to JAX."""
        ...


class BoundName(str):
    """The name of a jit equation that `runner` runs."""

    __slots__ = ("runner",)
    runner: Runner

    def __new__(cls, name: str, runner: Runner) -> "BoundName":
        self = super().__new__(cls, name)
        self.runner = runner
        return self


def is_tracer(x: Any) -> bool:
    """Whether `x` is a tracer of some transformation."""
    return isinstance(x, Tracer)


def is_forward_tracer(x: Any) -> bool:
    """Whether `x` is a tracer of `jax.jvp`."""
    return type(x).__name__ == "JVPTracer"


def under_jit() -> bool:
    """Whether a function is being traced to a jaxpr now, so that nothing runs eagerly."""
    return jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


def at_top_level() -> bool:
    """Whether no transformation or trace is going on in this thread."""
    if core is not None:
        return core.trace_state_clean()
    return jex_core.get_opaque_trace_state(convention="nnx") == _top_level


def is_available() -> bool:
    """Whether this JAX has the jit equation that this module knows."""
    if _jax_impl is None:
        return False
    parameters = inspect.signature(_jax_impl).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == _PARAMETERS


def bind(jaxpr: ClosedJaxpr, args: Sequence[Any], name: BoundName) -> list[Any]:
    """Binds `jaxpr` as a jit equation that comes back to `name.runner` when it runs.

    Raises:
        TraceError: This JAX is not known well enough.
    """
    if not is_available():
        raise TraceError(
            message(
                f"`{name}` cannot be transformed eagerly on jax `{jax.__version__}`: its jit "
                "equation is not the one that this version of multimesh knows.",
                ways=(
                    "Transform inside: `mjit(jax.grad(f))` in place of `jax.grad(mjit(f))`.",
                    "Install a jax that this version of multimesh was checked with.",
                ),
            )
        )
    install()
    num_inputs, num_results = len(args), len(jaxpr.out_avals)
    return jit_p.bind(
        *args,
        jaxpr=jaxpr,
        in_shardings=(UNSPECIFIED,) * num_inputs,
        out_shardings=(UNSPECIFIED,) * num_results,
        in_layouts=(None,) * num_inputs,
        out_layouts=(None,) * num_results,
        donated_invars=(False,) * num_inputs,
        ctx_mesh=_EMPTY_MESH,
        name=name,
        keep_unused=False,
        inline=False,
        compiler_options_kvs=(),
    )


def install() -> None:
    """Makes equations with a `BoundName` run by their runner. Does nothing the second time."""
    global _jax_impl, _installed
    with _LOCK:
        if not _installed:
            _jax_impl = jit_p.impl
            jit_p.def_impl(_impl)
            _installed = True


def uninstall() -> None:
    """Gives the jit equation back to JAX."""
    global _installed
    with _LOCK:
        if _installed:
            jit_p.def_impl(_jax_impl)
            _installed = False


def _impl(*args: Any, **params: Any) -> Any:
    name = params["name"]
    results = None
    if type(name) is BoundName:
        results = name.runner.run_equation(params["jaxpr"], args, params["donated_invars"])
    return _jax_impl(*args, **params) if results is None else results


def closed_over_tracers(traced: Any) -> tuple[Any, ...]:
    """Returns the tracers that a `jax.jit(f).trace(...)` found `f` to close over.

    Its jaxpr takes them before the flat arguments.
    """
    return tuple(getattr(traced, "_consts", ()))
