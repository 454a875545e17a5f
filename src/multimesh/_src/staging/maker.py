"""Makes the staged forms and the variants of one function: trace, cut into tasks, compile."""

import functools
import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from multimesh._src.frontend import arguments as arguments_lib
from multimesh._src.frontend.arguments import ArgumentSpec, Statics
from multimesh._src.frontend.contexts import ActiveContexts
from multimesh._src.frontend.tracing import TracedFunction, trace
from multimesh._src.report.dump import partition_and_dump
from multimesh._src.runtime.counters import counters
from multimesh._src.staging.binding import Binding, registered
from multimesh._src.staging.initial import cut_by_results, is_cut_by_results
from multimesh._src.staging.matched import (
    Findings,
    findings,
    is_plain,
    no_match_warning,
    no_matcher_warning,
    why_pieces,
    why_plain,
)
from multimesh._src.staging.plain import plain_jit, together
from multimesh._src.staging.staged import CallTypes, Lowered, PlainBackend, PlanBackend, Traced
from multimesh._src.staging.variants import Variant, device_sets, takes_of_plan

_LEAF = jax.tree.structure(0)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, split and flattened, and the contexts that hold for it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    statics: Statics
    leaves: Sequence[Any]
    tree: Any
    contexts: ActiveContexts

    def all_args(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the static ones back in place."""
        return self.joined(self.args, self.kwargs)

    def joined(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts the static arguments of this call among others."""
        joined = arguments_lib.join_statics(args, self.statics)
        return joined, {**kwargs, **dict(self.statics.kwargs)}


@dataclass(frozen=True, slots=True)
class Maker:
    """A function with its `mjit` options.

    Attributes:
        fun: The user's function.
        spec: Its static and donated arguments.
        options: Options of `jax.jit`.
        in_shardings: As given.
        out_shardings: As given.
        binding: Where it takes its contexts from.
        always_ours: Whether even a program that says nothing of places is cut by us.
        by_results: Whether the results alone say where it runs (`staging.initial`).
        is_served: Whether it serves a plain `jax.jit` function, which may well match no task.
    """

    fun: Callable[..., Any]
    spec: ArgumentSpec
    options: Mapping[str, Any]
    in_shardings: Any
    out_shardings: Any
    binding: Binding
    always_ours: bool = False
    by_results: bool = False
    is_served: bool = False
    _plain: dict[Hashable, Any] = field(default_factory=dict)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Splits and flattens the arguments of a call made here."""
        args, kwargs, statics = arguments_lib.split_statics(self.spec, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        return Call(args, kwargs, statics, leaves, tree, self.binding.contexts())

    def variant(self, call: Call) -> Variant:
        """Traces and compiles the function for a call."""
        if call.contexts.settings.ignore_transforms:
            return self._plain_variant(call, fits_all=True)
        traced, types = self._trace(call)
        found = findings(traced)
        if self._is_plain(traced, found, call):
            return self._plain_variant(call, fits_all=False)
        compiled = self._lower(traced, types, found, call).compile()
        backend = compiled.backend
        takes = (None,) * len(call.leaves)
        if isinstance(backend, PlanBackend):
            takes = takes_of_plan(backend.plan, traced, found.matched)
        return Variant(backend.call, traced.out_tree, takes, False)

    def trace(self, call: Call) -> Traced:
        """Traces the function for a call."""
        traced, types = self._trace(call)
        return Traced(traced, types, lambda: self._lower_or_plain(traced, types, call))

    def trace_unless_plain(self, call: Call) -> Traced | None:
        """Traces the function for a call; returns None where it is plain JAX (R15)."""
        traced, types = self._trace(call)
        if self._is_plain(traced, findings(traced), call):
            return None
        return Traced(traced, types, lambda: self._lower_or_plain(traced, types, call))

    def plain_jit(self, contexts: ActiveContexts) -> Any:
        """Returns the function under plain `jax.jit` with the same options."""
        mesh = contexts.global_mesh
        if mesh not in self._plain:
            self._plain[mesh] = plain_jit(
                self.fun, self.options, self.in_shardings, self.out_shardings, mesh
            )
        return self._plain[mesh]

    def nested_jit(self, contexts: ActiveContexts, name: str) -> Any:
        """Returns the function under plain `jax.jit`, as an equation with this name."""
        key = (contexts.global_mesh, id(name))
        if key not in self._plain:

            @functools.wraps(self.fun)
            def named(*args: Any, **kwargs: Any) -> Any:
                return self.fun(*args, **kwargs)

            named.__name__ = name
            mesh = contexts.global_mesh
            self._plain[key] = plain_jit(
                named, self.options, self.in_shardings, self.out_shardings, mesh
            )
        return self._plain[key]

    def clear(self) -> None:
        """Forgets what plain JAX compiled."""
        self._plain.clear()

    def _trace(self, call: Call) -> tuple[TracedFunction, CallTypes]:
        counters.traces += 1
        with call.contexts.activate():
            traced = trace(
                self.fun,
                call.args,
                call.kwargs,
                spec=self.spec,
                statics=call.statics,
                in_shardings=self.in_shardings,
                out_shardings=self.out_shardings,
                surroundings=self.binding.surroundings(call.contexts),
            )
        avals = tuple(argument.aval for argument in traced.arguments)
        names = tuple(argument.name for argument in traced.arguments)
        return traced, CallTypes(self.spec, call.tree, avals, names)

    def _is_plain(self, traced: TracedFunction, found: Findings, call: Call) -> bool:
        if self.by_results:
            return False
        plain = is_plain(traced, found, device_sets(call.leaves))
        matchers = registered(call.contexts.contexts)
        if (plain or self.always_ours) and not found.matched:
            if matchers and (found.scheduled or not self.is_served):
                text = no_match_warning(self.binding.name, matchers, found.scopes)
                warnings.warn(text, stacklevel=_users_frame())
            elif found.scheduled:
                text = no_matcher_warning(self.binding.name)
                warnings.warn(text, stacklevel=_users_frame())
        return plain and not self.always_ours

    def _lower_or_plain(self, traced: TracedFunction, types: CallTypes, call: Call) -> Lowered:
        found = findings(traced)
        ignore = call.contexts.settings.ignore_transforms
        if not ignore and not self._is_plain(traced, found, call):
            return self._lower(traced, types, found, call)
        matchers = registered(call.contexts.contexts)
        why = why_plain(self.binding.name, matchers, found, ignored=ignore)
        return Lowered(traced, types, None, lambda: self._plain_backend(types, call), why)

    def _lower(
        self, traced: TracedFunction, types: CallTypes, found: Findings, call: Call
    ) -> Lowered:
        if (self.by_results or not found.matched) and is_cut_by_results(traced):
            why = why_pieces(traced)
            return Lowered(traced, types, None, lambda: cut_by_results(traced), why)
        with call.contexts.activate():
            return Lowered(traced, types, partition_and_dump(traced), None)

    def _plain_backend(self, types: CallTypes, call: Call) -> PlainBackend:
        args, kwargs = call.all_args()
        mesh = call.contexts.global_mesh
        with call.contexts.activate():
            compiled = self.plain_jit(call.contexts).lower(*args, **kwargs).compile()

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            args, kwargs = jax.tree.unflatten(types.in_tree, together(list(leaves), mesh))
            return jax.tree.leaves(compiled(*args, **kwargs))

        return PlainBackend(compiled, run)

    def _plain_variant(self, call: Call, *, fits_all: bool) -> Variant:
        """Returns a variant that calls plain JAX; its results are one "leaf", not flattened."""
        jitted, mesh = self.plain_jit(call.contexts), call.contexts.global_mesh
        tree, contexts = call.tree, call.contexts
        # The call itself must not be kept: it holds the arguments.
        empty = replace(call, args=(), kwargs={}, leaves=())

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            args, kwargs = empty.joined(*jax.tree.unflatten(tree, together(list(leaves), mesh)))
            with contexts.activate():
                return (jitted(*args, **kwargs),)

        return Variant(run, _LEAF, (None,) * len(call.leaves), not fits_all)


def _users_frame() -> int:
    """Returns the `stacklevel` of the user's code for a warning raised by the caller."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and "multimesh._src" in frame.f_globals.get("__name__", ""):
        level, frame = level + 1, frame.f_back
    return level
