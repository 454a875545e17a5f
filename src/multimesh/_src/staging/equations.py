"""`mjit` functions under eager transformations.

    jax.grad(step)(state, batch), outside of every jit

`Equations.call` puts one jit equation in the place of the call. What autodiff makes of it comes
back as jit equations that carry our name (`jit_compat.jit_hook`); `EquationRunner` partitions and
compiles each of them once, by the identity of its jaxpr, under the contexts that the call had.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from multimesh._src.frontend.arguments import Statics, function_name
from multimesh._src.frontend.contexts import ActiveContexts
from multimesh._src.frontend.logical import bind_constraints
from multimesh._src.frontend.scopes import ambient_scope
from multimesh._src.frontend.tracing import (
    PlainTrace,
    Result,
    argument,
    plain_aval,
    trace_plainly,
    traced_function,
    without_mesh,
)
from multimesh._src.frontend.wanted import Wanted
from multimesh._src.ir.scope import Scope
from multimesh._src.ir.submesh import auto_mesh
from multimesh._src.jax_compat import avals, jit_hook
from multimesh._src.report.dump import partition_and_dump
from multimesh._src.runtime.compiled_plan import compile_plan
from multimesh._src.runtime.counters import counters
from multimesh._src.staging.binding import Binding
from multimesh._src.staging.matched import findings, is_plain
from multimesh._src.staging.plain import as_arrays, jit_shardings
from multimesh._src.staging.variants import (
    Variant,
    VariantCache,
    device_sets,
    takes_of_plan,
)


class Equations:
    """The equations of one `mjit` function. Holds jaxprs, no arrays."""

    def __init__(self, binding: Binding):
        self._binding = binding
        self._traces: dict[Hashable, PlainTrace] = {}
        self._names: dict[Hashable, jit_hook.BoundName] = {}

    def clear(self) -> None:
        """Forgets all traces and everything compiled."""
        self._traces.clear()
        self._names.clear()

    def call(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        statics: Statics,
        contexts: ActiveContexts,
    ) -> Any:
        """Binds the call as one equation; see the module.

        Args:
            fun: The user's function.
            args: Dynamic arguments, some of them tracers.
            kwargs: Dynamic keyword arguments.
            statics: Static arguments.
            contexts: The contexts that hold for the call.
        """
        leaves, tree = jax.tree.flatten((args, dict(kwargs)))
        types = tuple((a.shape, a.dtype, a.weak_type) for a in map(plain_aval, leaves))
        key = (tree, statics, self._binding.key(), types)
        plain = self._traces.get(key)
        if plain is None:
            counters.traces += 1
            with contexts.activate():
                matcher = self._binding.surroundings(contexts).matcher
                plain = trace_plainly(fun, args, kwargs, statics, matcher)
            if not plain.closed_over:  # else it holds tracers of this very call
                self._traces[key] = plain
        name = self.name(contexts)
        operands = plainly_typed([*plain.closed_over, *leaves])
        flat = jit_hook.bind(plain.jaxpr, operands, name)
        return jax.tree.unflatten(plain.out_tree, flat)

    def name(self, contexts: ActiveContexts) -> jit_hook.BoundName:
        """Returns the name of equations that run under these contexts."""
        key = contexts.cache_key
        if key not in self._names:
            runner = EquationRunner(contexts, self._binding)
            self._names[key] = jit_hook.BoundName(self._binding.name, runner)
            if jit_hook.is_available():
                jit_hook.install()
        return self._names[key]


class EquationRunner:
    """Runs equations under fixed contexts."""

    def __init__(self, contexts: ActiveContexts, binding: Binding):
        self._contexts, self._binding = contexts, binding
        # Nothing in a cache may hold its jaxpr: JAX keeps jaxprs alive as long as it needs them.
        self._caches: weakref.WeakKeyDictionary[ClosedJaxpr, VariantCache]
        self._caches = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def run_equation(
        self, jaxpr: ClosedJaxpr, args: Sequence[Any], donated: tuple[bool, ...]
    ) -> Sequence[Any] | None:
        """Runs an equation on concrete arguments; None leaves it to JAX (R15)."""
        with self._lock:
            cache = self._caches.setdefault(jaxpr, VariantCache())
        leaves, ambient = as_arrays(args), ambient_scope()
        variant = cache.find(
            (ambient, avals.trace_context()), leaves, lambda: self._make(jaxpr, leaves, ambient)
        )
        return None if variant.one_device_set else _on_auto_meshes(variant.run(leaves))

    def _make(self, jaxpr: ClosedJaxpr, leaves: Sequence[Any], ambient: Scope) -> Variant:
        surroundings = self._binding.surroundings(self._contexts)
        names = tuple(f"result[{i}]" for i in range(len(jaxpr.out_avals)))
        plain = PlainTrace(self._binding.name, jaxpr, None, names, ())
        arguments = tuple(
            argument(i, f"argument[{i}]", leaf, False, Wanted(), surroundings.global_mesh)
            for i, leaf in enumerate(leaves)
        )
        results = tuple(
            Result(name, without_mesh(aval), None, None)
            for name, aval in zip(names, jaxpr.out_avals, strict=True)
        )
        traced = traced_function(plain, ambient, arguments, results, surroundings)
        found = findings(traced)
        if is_plain(traced, found, device_sets(leaves)):
            return Variant(as_arrays, None, (), True)
        with self._contexts.activate():
            plan = partition_and_dump(traced).plan
            compiled = compile_plan(plan, name=self._binding.name)
        takes = takes_of_plan(plan, traced, found.matched)
        return Variant(compiled.call, None, takes, False)


def plainly_typed(values: Sequence[Any]) -> list[Any]:
    """Returns values whose types name no place: reverse mode cannot mix types of several meshes.

    Arrays on Explicit meshes or in other memories, also those inside tracers, go to the same
    devices and layout on a mesh with Auto axes, in the default memory, and their cotangents back
    (R17). Forward mode and batching need no help.
    """
    return [
        _without_mesh(value)
        if avals.names_a_place(jax.typeof(value)) and not jit_hook.is_forward_tracer(value)
        else value
        for value in values
    ]


@jax.custom_vjp
def _without_mesh(x: Any) -> Any:
    return x if jit_hook.is_tracer(x) else _on_auto_meshes([x])[0]


def _without_mesh_forward(x: Any) -> tuple[Any, Any]:
    return _without_mesh(x), x


def _without_mesh_backward(x: Any, cotangent: Any) -> tuple[Any]:
    return (cotangent if jit_hook.is_tracer(x) else jax.device_put(cotangent, x.sharding),)


_without_mesh.defvjp(_without_mesh_forward, _without_mesh_backward)


def _on_auto_meshes(arrays: Sequence[Any]) -> list[Any]:
    return [
        jax.device_put(array, _auto(array.sharding))
        if isinstance(array, jax.Array) and avals.names_a_place(array.aval)
        else array
        for array in arrays
    ]


def _auto(sharding: Any) -> Sharding:
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(*sharding.device_set)
    return NamedSharding(auto_mesh(sharding.mesh), sharding.spec)


def constrained(
    fun: Callable[..., Any], in_shardings: Any, out_shardings: Any, global_mesh: Mesh | None
) -> Callable[..., Any]:
    """Returns `fun` with in_shardings and out_shardings as constraints inside it."""
    if in_shardings is None and out_shardings is None:
        return fun

    def constrained_fun(*args: Any, **kwargs: Any) -> Any:
        if in_shardings is not None:
            wanted = jit_shardings(in_shardings, global_mesh)
            wanted = tuple(wanted) if isinstance(wanted, list) else wanted
            args = bind_constraints(args, wanted, global_mesh)
        results = fun(*args, **kwargs)
        if out_shardings is None:
            return results
        return bind_constraints(results, jit_shardings(out_shardings, global_mesh), global_mesh)

    constrained_fun.__name__ = function_name(fun)
    return constrained_fun
