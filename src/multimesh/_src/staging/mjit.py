"""`mjit`: `jax.jit` for programs over several submeshes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh

from multimesh._src.frontend.arguments import (
    NO_STATICS,
    argument_spec,
    check_callable,
    function_name,
    named_arguments,
    split_statics,
)
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tracing import check_arguments
from multimesh._src.jax_compat import jit_hook
from multimesh._src.jax_compat.jit_calls import NOT_SERVED
from multimesh._src.staging.binding import make_binding
from multimesh._src.staging.equations import Equations, constrained
from multimesh._src.staging.maker import Maker
from multimesh._src.staging.plain import together
from multimesh._src.staging.staged import Lowered, Traced
from multimesh._src.staging.variants import Variant, VariantCache


def mjit(
    f: Callable[..., Any] | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    mesh: Mesh | MultiMesh | None = None,
    devices: Sequence[Any] | None = None,
) -> Any:
    """Compiles a function whose tasks run on several submeshes.

    Behaves like `jax.jit`: the function may be differentiated, batched, nested and staged. Made
    inside a context it is bound to it; otherwise each call uses the contexts that are active.

    Args:
        f: The function. Without it, a decorator is returned.
        in_shardings: A prefix pytree of the positional arguments: NamedSharding (on the global mesh
            it gives the layout, on another mesh the place too), PartitionSpec or None.
        out_shardings: The same for the results. The rest comes out where it is made, and what
            succeeds an argument where that argument lies.
        donate_argnums: Arguments whose buffers may be used for results; they are deleted.
        donate_argnames: The same by name.
        static_argnums: Arguments that are Python values; one compilation for each value.
        static_argnames: The same by name.
        keep_unused: As in `jax.jit`; matters only where the function is plain JAX.
        mesh: The global mesh where no `MultiMesh` is active.
        devices: What the numbers of `TaskMesh` index. Default: `jax.devices()`.

    Raises:
        TraceError: Arguments that the function does not have.
        MeshError: `mesh` is not that of the active `MultiMesh`.

    Example:
        >>> import jax.numpy as jnp
        >>> double = mjit(lambda x: x * 2)
        >>> double(jnp.ones(2)).tolist()
        [2.0, 2.0]
    """
    options = {
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "keep_unused": keep_unused,
    }
    if f is None:
        return functools.partial(
            mjit,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            mesh=mesh,
            devices=devices,
            **options,
        )
    check_callable(f, "mjit")
    binding = make_binding(function_name(f), mesh, devices)
    named = {key: value for key, value in options.items() if key != "keep_unused"}
    spec = argument_spec(f, **named)
    return MultiMeshFunction(Maker(f, spec, options, in_shardings, out_shardings, binding))


@final
class MultiMeshFunction:
    """What `mjit` returns; see there."""

    def __init__(self, maker: Maker):
        self._maker = maker
        self._binding, self._spec = maker.binding, maker.spec
        self._cache = VariantCache()
        self._equations = Equations(maker.binding)
        functools.update_wrapper(self, maker.fun, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds like a function, so that methods can be decorated."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<mjit of {self._binding.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function; traces and compiles it when no variant fits."""
        if not jit_hook.at_top_level() or _jit_is_disabled():
            return self._call_within(args, kwargs)
        variant, leaves = self._find(args, kwargs)
        return jax.tree.unflatten(variant.out_tree, variant.run(leaves))

    def call_unless_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function like a call does; returns NOT_SERVED where it is plain JAX (R15)."""
        if not jit_hook.at_top_level():
            return self._call_within(args, kwargs)
        variant, leaves = self._find(args, kwargs)
        if variant.one_device_set:
            return NOT_SERVED
        return jax.tree.unflatten(variant.out_tree, variant.run(leaves))

    def trace_unless_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Traces the function like `trace` does; returns NOT_SERVED where it is plain JAX."""
        traced = self._maker.trace_unless_plain(self._maker.call(args, kwargs))
        return NOT_SERVED if traced is None else traced

    def _find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Variant, Sequence[Any]]:
        """Finds or makes the variant of a call, and flattens its arguments."""
        statics = NO_STATICS
        given = args, kwargs
        if self._spec.has_statics:
            args, kwargs, statics = split_statics(self._spec, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, statics, self._binding.key())
        try:
            variant = self._cache.find(
                key, leaves, lambda: self._maker.variant(self._maker.call(*given))
            )
        except TypeError:
            check_arguments(named_arguments(self._spec, args, kwargs, statics))
            raise
        return variant, leaves

    def _call_within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function inside a transformation or a trace, or with jit disabled."""
        maker, contexts = self._maker, self._binding.contexts()
        disabled = _jit_is_disabled()
        if disabled and jit_hook.at_top_level():
            args, kwargs = together((args, dict(kwargs)), contexts.global_mesh)
        if disabled or contexts.settings.ignore_transforms:
            with contexts.activate():
                return maker.plain_jit(contexts)(*args, **kwargs)
        if jit_hook.under_jit():
            # The outer trace may be that of `jax.checkpoint`, whose equations run eagerly.
            name = self._equations.name(contexts)
            with contexts.activate():
                return maker.nested_jit(contexts, name)(*args, **kwargs)
        call = maker.call(args, kwargs)
        fun = constrained(maker.fun, maker.in_shardings, maker.out_shardings, contexts.global_mesh)
        return self._equations.call(fun, call.args, call.kwargs, call.statics, contexts)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Traces the function for arguments, which may be `jax.ShapeDtypeStruct`s."""
        return self._maker.trace(self._maker.call(args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function and cuts it into tasks."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns shapes and dtypes of the results, as a pytree."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets everything compiled for this function."""
        self._cache.clear()
        self._maker.clear()
        self._equations.clear()


def _jit_is_disabled() -> bool:
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
