"""Sharding propagation with Shardy, without compiling anything.

Stock jaxlib carries Shardy's passes. A function is lowered to StableHLO with the shardings that
are known, the pass pipeline `sdy-propagation-pipeline` runs over the module, and the shardings of
arguments and results are read back from its `sdy.sharding` attributes:

    fn       (x, w) -> (x @ w,)
    given    in (P('data', None), None)                out (None,)
    result   in (P('data', None), P(None, None))       out (P('data', None),)

What a PartitionSpec cannot say is cut: parts of axes, and axes that do not divide their dim (jit
refuses such layouts of arguments and results).

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Costs about 50 us an equation for the passes and 40 for
tracing and lowering.

Private names: `jax._src.config.use_shardy_partitioner` and the Python bindings in `jaxlib.mlir`.
Where they are missing the function is compiled instead, and XLA is asked what it chose: this needs
real devices, and leaves free arguments replicated.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeAlias, TypeGuard, cast

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from multimesh._src.jax_compat import private

_config: Any = None
_sdy: Any = None
_passmanager: Any = None
if private.ALLOWED:
    with suppress(ImportError):
        from jax._src import config as _config
    with suppress(ImportError):
        from jaxlib.mlir import passmanager as _passmanager
        from jaxlib.mlir.dialects import sdy as _sdy

Specs: TypeAlias = tuple[PartitionSpec, ...]
MaybeSpecs: TypeAlias = Sequence[PartitionSpec | None]
Dims: TypeAlias = Sequence[Sequence[tuple[str, ...]]]  # per value, per dim, the axis names

_PIPELINE = "builtin.module(sdy-propagation-pipeline)"
_ATTRIBUTE = "sdy.sharding"
_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
_NO_MESH = AbstractMesh((), ())


def propagate_shardings(
    function: Any,
    avals: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    in_specs: MaybeSpecs,
    out_specs: MaybeSpecs,
) -> tuple[Specs, Specs]:
    """Infers the free shardings of a function's arguments and results.

    Args:
        function: A callable from flat arguments to a flat sequence of results, or a closed jaxpr.
        avals: One per argument; shape, dtype and weak type are used.
        mesh: A mesh whose axes are all of type Auto. Sharding constraints inside the function
            must be on the same mesh.
        in_specs: One per argument; None leaves it free. Dims that are `P.UNCONSTRAINED` are free.
        out_specs: The same for the results.

    Returns:
        The specs of the arguments and of the results. Specs without free dims come back as they
        were given. The others have one entry per dim, of whole axes that divide the dim, and name
        no axes of size 1 besides those given.
    """
    if all(map(_is_fixed, (*in_specs, *out_specs))):
        return cast(Specs, tuple(in_specs)), cast(Specs, tuple(out_specs))
    flat: Any = function if callable(function) else jaxpr_as_fun(function)
    if mesh.size == 1:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            out_avals = jax.eval_shape(flat, *map(_abstract, avals))
        in_dims: Dims = [()] * len(in_specs)
        out_dims: Dims = [()] * len(out_specs)
    else:
        in_dims, out_avals, out_dims = _inferred_dims(flat, avals, mesh, in_specs, out_specs)
    return (
        _merged_specs(in_specs, in_dims, avals, mesh),
        _merged_specs(out_specs, out_dims, out_avals, mesh),
    )


def _inferred_dims(
    flat: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    in_specs: MaybeSpecs,
    out_specs: MaybeSpecs,
) -> tuple[Dims, Sequence[Any], Dims]:
    """Lowers and propagates; returns argument dims, result avals and result dims."""

    def constrained(*args: Any) -> list[Any]:
        # jit takes no partly free shardings, so these are stated inside the function
        outs = flat(*_constrain(args, mesh, in_specs))
        return _constrain(outs, mesh, out_specs)

    with shardy_enabled(), jax.sharding.use_abstract_mesh(_NO_MESH):
        traced = jax.jit(
            constrained,
            in_shardings=tuple(_jit_sharding(mesh, spec) for spec in in_specs),
            out_shardings=[_jit_sharding(mesh, spec) for spec in out_specs],
            keep_unused=True,
        ).trace(*map(_abstract, avals))
        lowered = traced.lower(lowering_platforms=(_platform(mesh),))
    read = _propagated if _sdy is not None else _compiled
    in_dims, out_dims = read(lowered, len(in_specs), len(out_specs))
    return in_dims, traced.out_info, out_dims


def _propagated(lowered: Any, num_args: int, num_results: int) -> tuple[Dims, Dims]:
    """Runs the passes over the module, in place."""
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        _passmanager.PassManager.parse(_PIPELINE).run(module.operation)
        main = next(op for op in module.body.operations if _symbol(op) == "main")
        in_attributes, out_attributes = list(main.arg_attrs), list(main.result_attrs)
    # tokens of ordered effects stand before the arguments and results proper
    in_attributes = in_attributes[len(in_attributes) - num_args :]
    out_attributes = out_attributes[len(out_attributes) - num_results :]
    return [*map(_dims, in_attributes)], [*map(_dims, out_attributes)]


def _compiled(lowered: Any, num_args: int, num_results: int) -> tuple[Dims, Dims]:
    """The same by compiling: slow, but public."""
    compiled = lowered.compile()
    in_dims = [*map(_dims_of_sharding, compiled.input_shardings[0])]
    out_dims = [*map(_dims_of_sharding, compiled.output_shardings)]
    return in_dims[:num_args], out_dims[:num_results]


def shardy_enabled() -> AbstractContextManager[None]:
    """Lowers with Shardy inside the context, whatever the user's flag says."""
    flag = getattr(_config, "use_shardy_partitioner", None)
    return nullcontext() if flag is None else flag(True)


def _is_fixed(spec: PartitionSpec | None) -> TypeGuard[PartitionSpec]:
    return spec is not None and _UNCONSTRAINED not in tuple(spec)


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def _jit_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec | None) -> NamedSharding | None:
    return NamedSharding(mesh, spec) if _is_fixed(spec) else None


def _constrain(values: Sequence[Any], mesh: Mesh | AbstractMesh, specs: MaybeSpecs) -> list[Any]:
    """Constrains the values whose spec is given in part."""
    return [
        value
        if spec is None or _is_fixed(spec)
        else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))
        for value, spec in zip(values, specs, strict=True)
    ]


def _platform(mesh: Mesh | AbstractMesh) -> str:
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    return mesh.devices.flat[0].platform


def _symbol(operation: Any) -> str:
    attributes = operation.attributes
    return attributes["sym_name"].value if "sym_name" in attributes else ""


def _dims(attributes: Any) -> Sequence[tuple[str, ...]]:
    """Returns the axes of each dim of an argument or result; () if nothing is known of it."""
    if _ATTRIBUTE not in attributes:
        return ()
    sharding = _sdy.TensorShardingAttr(attributes[_ATTRIBUTE])
    return [_whole_axes(_sdy.DimensionShardingAttr(dim)) for dim in sharding.dimension_shardings]


def _dims_of_sharding(sharding: Sharding) -> Sequence[tuple[str, ...]]:
    if not isinstance(sharding, NamedSharding):
        return ()
    entries = [(entry,) if isinstance(entry, str) else entry for entry in sharding.spec]
    return [tuple(entry or ()) for entry in entries]


def _whole_axes(dim: Any) -> tuple[str, ...]:
    """Returns the axes of a dim up to the first one that comes only in part."""
    names = []
    for reference in map(_sdy.AxisRefAttr, dim.axes):
        if reference.sub_axis_info is not None:
            break
        names.append(reference.name)
    return tuple(names)


def _merged_specs(
    specs: MaybeSpecs, dims: Dims, avals: Sequence[Any], mesh: Mesh | AbstractMesh
) -> Specs:
    return tuple(
        spec if _is_fixed(spec) else _merged(spec, found, aval.shape, mesh)
        for spec, found, aval in zip(specs, dims, avals, strict=True)
    )


def _merged(
    spec: PartitionSpec | None,
    dims: Sequence[tuple[str, ...]],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
    """Fills the free dims of a spec with what was found.

    Typed key arrays are found with their physical rank; the trailing dims fall away.
    """
    rank = len(shape)
    given = (_UNCONSTRAINED,) * rank if spec is None else (*spec, *(None,) * (rank - len(spec)))
    found = (*dims, *((),) * rank)[:rank]
    entries = [
        _entry(_dividing(axes, size, mesh)) if want is _UNCONSTRAINED else want
        for want, axes, size in zip(given, found, shape, strict=True)
    ]
    return PartitionSpec(*entries)


def _dividing(axes: tuple[str, ...], size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes before the first that does not divide what is left of the dim."""
    for count, name in enumerate(axes):
        if size % mesh.shape[name]:
            return axes[:count]
        size //= mesh.shape[name]
    return axes


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None
