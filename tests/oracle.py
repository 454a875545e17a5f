"""The yardstick of the tests (rule R1): two references, a float64 oracle and the bound.

Reference A is plain `jax.jit` of the function on one device. Reference B is plain `jax.jit` of the
same function, with the same microbatch loop, on one mesh of the submesh's shape. The *oracle* is
the traced jaxpr of A with every floating equation widened to float64 and random bits taken as
traced; tracing in x64 mode would draw other bits.

The error of an array is its largest absolute deviation from the oracle, in ulps (of the array's
dtype) of the oracle's largest element. Ours may be at most `4 * max(error A, error B) + 8`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SLACK_FACTOR = 4
SLACK_ULPS = 8
ILL_CONDITIONED_ULPS = 2.0**10
_FLOATS = ("bfloat16", "float16", "float32", "float64")

# Equations that only say where a value lies or how it is rounded: the identity for the oracle.
IDENTITIES = frozenset(
    {
        "copy",
        "copy_p",
        "device_put",
        "layout_constraint",
        "multimesh_constraint",
        "mesh_cast",
        "optimization_barrier",
        "reduce_precision",
        "reshard",
        "sharding_constraint",
    }
)
# Equations that look at the bits of a float, or are written for one: they run on the traced dtype.
BITWISE = frozenset(
    {"bitcast_convert_type", "nextafter", "pallas_call", "pure_callback", "random_gamma"}
)


class IllConditionedError(Exception):
    """A reference is off by more than `ill_conditioned_ulps`: the program says nothing."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one array of a result compares. Errors are in ulps; exact dtypes have 0 or inf."""

    name: str
    dtype: str
    error_a: float
    error_b: float
    error_ours: float
    bitwise: bool  # ours equals reference A bit for bit

    @property
    def bound(self) -> float:
        """The error that ours may have."""
        return SLACK_FACTOR * max(self.error_a, self.error_b) + SLACK_ULPS

    @property
    def exceeds(self) -> bool:
        """Whether ours is too far off; True for a NaN too."""
        return not self.error_ours <= self.bound

    @property
    def ill_conditioned(self) -> bool:
        """Whether the references themselves are too far off to judge by."""
        return not max(self.error_a, self.error_b) <= ill_conditioned_ulps(self.dtype)

    def __str__(self) -> str:
        errors = f"A {self.error_a:.2f}, B {self.error_b:.2f}, ours {self.error_ours:.2f}"
        return f"{self.name} ({self.dtype}): {errors} ulp, bound {self.bound:.2f}"


def ill_conditioned_ulps(dtype: str) -> float:
    """The error of a reference beyond which it says nothing: 2^10 ulps, or an eighth if less.

    2^10 ulps of bfloat16 would be four times the largest element: a branch that rounding flips is
    noise long before that.
    """
    if dtype not in _FLOATS:
        return ILL_CONDITIONED_ULPS
    return min(ILL_CONDITIONED_ULPS, 2.0 ** (jnp.finfo(dtype).nmant - 2))


@dataclass(frozen=True, slots=True)
class Comparison:
    """How all arrays of a result compare."""

    leaves: tuple[Leaf, ...]

    @property
    def num_bitwise(self) -> int:
        """How many arrays are bit for bit those of reference A."""
        return sum(leaf.bitwise for leaf in self.leaves)

    def check(self) -> None:
        """Applies R1.

        Raises:
            IllConditionedError: if a reference is off by more than `ill_conditioned_ulps`.
            AssertionError: if an array of ours is off by more than the bound; names all of them.
        """
        # An exact array of ours that differs is wrong, whatever the floating ones are worth.
        wrong = [leaf for leaf in self.leaves if leaf.exceeds and not leaf.ill_conditioned]
        assert not wrong, "off by more than R1 allows:\n" + "\n".join(map(str, wrong))
        poor = [leaf for leaf in self.leaves if leaf.ill_conditioned]
        if poor:
            raise IllConditionedError("\n".join(map(str, poor)))


class Oracle:
    """`fun` in float64, traced at the types of `args`.

    Calling it gives the results of `fun` with every floating array as numpy float64. Arguments may
    have the traced dtypes or be float64, so that a state can be carried through several steps
    without rounding: `state, loss = oracle(state, batch)`.
    """

    def __init__(self, fun: Callable[..., Any], *args: Any):
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        self.dtypes = jax.tree.map(lambda s: s.dtype, shapes)
        self._in_tree = jax.tree.structure(args)
        self._out_tree = jax.tree.structure(shapes)
        self._in_dtypes = tuple(aval.dtype for aval in closed.in_avals)
        # Constants are inputs, so that XLA cannot fold (and round) with them.
        self._consts = tuple(_wide(c, jnp.asarray(c).dtype) for c in closed.consts)
        jaxpr = closed.jaxpr
        self._fun = jax.jit(lambda consts, values: _evaluate(jaxpr, consts, values))

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        assert tree == self._in_tree, f"traced with {self._in_tree}, called with {tree}"
        values = [_wide(x, dtype) for x, dtype in zip(leaves, self._in_dtypes, strict=True)]
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            results = self._fun(self._consts, values)
            # Keys stay jax arrays: numpy has no such dtype.
            results = [x if _is_key(x) else np.asarray(x) for x in results]
        return jax.tree.unflatten(self._out_tree, results)


def reference_a(fun: Callable[..., Any], *args: Any) -> Any:
    """Plain `jax.jit` of `fun` on one device."""
    return jax.jit(fun)(*jax.device_put(args, jax.devices()[0]))


def reference_b(fun: Callable[..., Any], mesh: Mesh, args: Sequence[Any], specs: Any = None) -> Any:
    """Plain `jax.jit` of `fun` on `mesh`; `specs` is a prefix of `args`, default replicated."""
    specs = PartitionSpec() if specs is None else specs
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda s: isinstance(s, PartitionSpec),
    )
    return jax.jit(fun)(*jax.device_put(tuple(args), shardings))


def compare(ours: Any, ref_a: Any, ref_b: Any, oracle: Any) -> Comparison:
    """Compares trees of results leaf by leaf; all must have one structure and equal dtypes."""
    paths, tree = jax.tree.flatten_with_path(ours)
    others = []
    for name, other in (("reference A", ref_a), ("reference B", ref_b), ("oracle", oracle)):
        leaves, other_tree = jax.tree.flatten(other)
        assert other_tree == tree, f"structure {tree} differs from {name}'s {other_tree}"
        others.append(leaves)
    columns = zip(paths, *others, strict=True)
    return Comparison(
        tuple(_leaf(jax.tree_util.keystr(p), x, a, b, o) for (p, x), a, b, o in columns)
    )


def error_ulps(array: Any, oracle: Any) -> float:
    """The largest deviation of a floating `array` in ulps of the largest element of `oracle`."""
    dtype = array.dtype
    got, want = _host_wide(array), _host_wide(oracle)
    if got.shape != want.shape:
        return float("inf")
    if got.size == 0:
        return 0.0
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return float("inf")
    if not np.isfinite(got[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    deviation = float(np.abs(got[finite] - want[finite]).max())
    return deviation / ulp(dtype, float(np.abs(want[finite]).max()))


def ulp(dtype: Any, magnitude: float) -> float:
    """The distance between neighbouring numbers of `dtype` around `magnitude`."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(2.0**exponent) * float(info.eps)


def bitwise_equal(x: Any, y: Any) -> bool:
    """Whether two arrays have one shape, one dtype and the same bits."""
    x, y = _plain(x), _plain(y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return x.tobytes() == y.tobytes()


def _leaf(name: str, ours: Any, ref_a: Any, ref_b: Any, oracle: Any) -> Leaf:
    dtype = ours.dtype
    assert dtype == ref_a.dtype == ref_b.dtype, (
        f"{name}: dtype `{dtype}`, reference A has `{ref_a.dtype}`, B has `{ref_b.dtype}`"
    )
    if jnp.issubdtype(dtype, jnp.inexact):
        a, b, x = (error_ulps(array, oracle) for array in (ref_a, ref_b, ours))
    else:
        # A reference that differs decides by rounding errors, as an argmax between near ties does.
        a, b, x = (
            0.0 if bitwise_equal(array, other) else float("inf")
            for array, other in ((ref_a, _as_dtype(oracle, dtype)), (ref_b, ref_a), (ours, ref_a))
        )
    return Leaf(name, str(dtype), a, b, x, bitwise_equal(ours, ref_a))


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates `jaxpr` on widened values; called while JAX traces it in x64 mode."""
    env: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return _wide(atom.val, atom.aval.dtype) if isinstance(atom, jex.Literal) else env[atom]

    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(atom) for atom in eqn.invars])
        for var, value in zip(eqn.outvars, results, strict=True):
            env[var] = value
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if not eqn.outvars:
        return ()  # an effect
    if name in IDENTITIES:
        return values
    if name in BITWISE:
        narrow = [_as_dtype(x, v.aval.dtype) for x, v in zip(values, eqn.invars, strict=True)]
        results = _bind(eqn.primitive, narrow, params)
        return [_wide(x, v.aval.dtype) for x, v in zip(results, eqn.outvars, strict=True)]
    if name == "scan":
        return _scan(params, values)
    if name == "while":
        return _while(params, values)
    if name == "cond":
        branches = [_called(branch) for branch in params["branches"]]
        return jax.lax.switch(values[0], branches, *values[1:])
    if name == "shard_map":
        return _shard_map(params, values)
    if name.endswith("linear_solve"):
        return _solve(params, values)
    for key in (
        "jaxpr",
        "call_jaxpr",
        "fun_jaxpr",
        "call",
    ):  # jit, remat, custom_jvp, custom_vjp, ...
        if key in params and not name.startswith("reduce"):
            return _called(params[key])(*values)
    return _bind(eqn.primitive, values, {key: _wide_param(p) for key, p in params.items()})


def _called(body: Any) -> Callable[..., list[Any]]:
    """A function that evaluates a (closed) jaxpr on widened values."""
    consts = [_wide(c, jnp.asarray(c).dtype) for c in getattr(body, "consts", ())]
    jaxpr = getattr(body, "jaxpr", body)
    return lambda *args: _evaluate(jaxpr, consts, args)


def _scan(params: Mapping[str, Any], values: list[Any]) -> list[Any]:
    if "ft_in" in params:  # JAX >= 0.11
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    # values = consts + carry + xs; the body gives carry + ys
    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    xs = values[num_consts + num_carry :]
    body = _called(params["jaxpr"])

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = body(*consts, *carry, *xs)
        return tuple(results[:num_carry]), tuple(results[num_carry:])

    carry, ys = jax.lax.scan(
        step, tuple(carry), tuple(xs), length=params["length"], reverse=params["reverse"]
    )
    return [*carry, *ys]


def _while(params: Mapping[str, Any], values: list[Any]) -> Sequence[Any]:
    # values = constants of the condition + constants of the body + carry
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = (
        values[: split[0]],
        values[split[0] : split[1]],
        values[split[1] :],
    )
    cond, body = _called(params["cond_jaxpr"]), _called(params["body_jaxpr"])

    def step(carry: Any) -> Any:
        # under vmap the condition has leading dims, and what is done stays as it is
        flags = cond(*cond_consts, *carry)[0]
        new = body(*body_consts, *carry)
        shaped = [flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim)) for x in carry]
        return tuple(map(jnp.where, shaped, new, carry)) if flags.ndim else tuple(new)

    return jax.lax.while_loop(lambda c: jnp.any(cond(*cond_consts, *c)[0]), step, tuple(carry))


def _shard_map(params: Mapping[str, Any], values: list[Any]) -> Sequence[Any]:
    body = _called(params["jaxpr"])
    mapped = jax.shard_map(
        lambda *args: tuple(body(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return mapped(*values)


def _solve(params: Mapping[str, Any], values: list[Any]) -> Sequence[Any]:
    # values = constants of matvec, vecmat, solve and transpose_solve + right-hand sides
    matvec, vecmat, solve, transposed = params["const_lengths"]
    first, end = matvec + vecmat, matvec + vecmat + solve + transposed
    consts = values[first : first + solve]
    return _called(params["jaxprs"].solve)(*consts, *values[end:])


def _bind(primitive: Any, values: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    results = primitive.bind(*values, **params)
    return results if primitive.multiple_results else [results]


def _wide_param(param: Any) -> Any:
    """A parameter of an equation with floating dtypes widened, in nested jaxprs too."""
    if isinstance(param, np.dtype | type):
        return _wide_dtype(param) if jnp.issubdtype(param, jnp.inexact) else param
    jaxpr = getattr(param, "jaxpr", param)
    if not isinstance(jaxpr, jex.Jaxpr):
        return param
    # The combiner of a scatter or a reduction.
    avals = [jax.ShapeDtypeStruct(v.aval.shape, _wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
    closed = jax.make_jaxpr(_called(param))(*avals)
    return closed if hasattr(param, "consts") else closed.jaxpr


def _wide_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _wide(value: Any, dtype: Any) -> Any:
    """`value` as an array of the widened `dtype`; a Python scalar is rounded to `dtype` first."""
    if _is_key(value):
        return value
    if isinstance(value, int | float | complex | bool):
        value = np.asarray(value, dtype)
    if isinstance(value, jax.core.Tracer):
        return value.astype(_wide_dtype(dtype))
    return np.asarray(value).astype(_wide_dtype(dtype))


def _as_dtype(value: Any, dtype: Any) -> Any:
    return value if _is_key(value) else value.astype(dtype)


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _plain(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if _is_key(array) else array)


def _host_wide(array: Any) -> np.ndarray:
    host = np.asarray(array)
    return host.astype(_wide_dtype(host.dtype))
