"""Tracing: one jaxpr on plain types, with names, placements, donation and successors beside it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.errors import ShardingError, TraceError
from multimesh._src.frontend import tracing
from multimesh._src.frontend.arguments import argument_spec, split_statics
from multimesh._src.frontend.matching import Matcher
from multimesh._src.frontend.tracing import Surroundings, TracedFunction
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.jax_compat import avals, jaxprs


def surroundings(global_mesh: Mesh | None = None, settings: Any = None) -> Surroundings:
    return Surroundings(Matcher(()), settings, global_mesh, tuple(jax.devices()))


def traced(fun: Any, *args: Any, mesh: Mesh | None = None, **options: Any) -> TracedFunction:
    kwargs = options.pop("kwargs", {})
    shardings = {k: options.pop(k) for k in ("in_shardings", "out_shardings") if k in options}
    spec = argument_spec(fun, **options)
    dynamic, keywords, statics = split_statics(spec, args, kwargs)
    return tracing.trace(
        fun,
        dynamic,
        keywords,
        spec=spec,
        statics=statics,
        surroundings=surroundings(mesh),
        **shardings,
    )


def mesh_of(devices: slice, explicit: bool) -> Mesh:
    chosen = jax.devices()[devices]
    if explicit:
        return jax.make_mesh((len(chosen),), ("x",), devices=chosen)
    return Mesh(np.array(chosen), ("x",))


def test_names_donation_and_successors() -> None:
    def step(state: Any, batch: Any, *, scale: Any) -> Any:
        return jax.tree.map(lambda x: x * scale, state), batch["x"].sum()

    state = {"params": [jnp.ones(3), jnp.ones((2, 2))]}
    got = traced(
        step, state, {"x": np.ones(4, np.float32)}, kwargs={"scale": 2.0}, donate_argnums=0
    )
    assert [a.name for a in got.arguments] == [
        "state['params'][0]",
        "state['params'][1]",
        "batch['x']",
        "scale",
    ]
    assert [a.donated for a in got.arguments] == [True, True, False, False]
    assert [r.name for r in got.results] == [
        "result[0]['params'][0]",
        "result[0]['params'][1]",
        "result[1]",
    ]
    assert [r.successor_of for r in got.results] == [0, 1, None]
    assert got.name == "step"
    assert got.arguments[3].aval.weak_type
    assert not got.arguments[0].aval.weak_type


def test_variadic_and_partial_names() -> None:
    got = traced(lambda first, *rest: first + rest[1], 1.0, 2.0, 3.0)
    assert [a.name for a in got.arguments] == ["first", "rest[0]", "rest[1]"]


def test_static_arguments() -> None:
    def f(x: Any, mode: str, *, power: int) -> Any:
        assert mode == "train"
        return x**power

    got = traced(f, 2.0, "train", kwargs={"power": 3}, static_argnums=(1,), static_argnames="power")
    assert [a.name for a in got.arguments] == ["x"]
    assert jaxprs.evaluate(got.jaxpr, jnp.float32(2.0)) == [8.0]


@pytest.mark.parametrize("explicit", [False, True])
def test_placements_stay_beside_the_jaxpr(explicit: bool) -> None:
    first, second = mesh_of(slice(0, 2), explicit), mesh_of(slice(2, 4), explicit)
    a = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(first, P("x", None)))
    b = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(second, P(None, "x")))
    # with Explicit types this contraction over two meshes could not be traced
    got = traced(lambda a, b, c: a @ b + c, a, b, jnp.ones(4))
    assert [arg.placement for arg in got.arguments] == [a.sharding, b.sharding, None]
    for var in [*got.jaxpr.jaxpr.invars, *got.jaxpr.jaxpr.outvars]:
        assert not avals.is_explicit(var.aval)


@pytest.mark.parametrize("explicit", [False, True])
def test_closed_over_arrays_become_plain_consts(explicit: bool) -> None:
    mesh = mesh_of(slice(0, 2), explicit)
    placed = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, P("x")))
    host = np.arange(4, dtype=np.float32)
    key = jax.random.key(3)

    def f(x: Any) -> Any:
        return x @ placed + host + jax.random.uniform(key, (4,))

    got = traced(f, jnp.ones(4))
    consts = jaxprs.consts_of(got.jaxpr)
    assert any(const is placed for const in consts)
    assert sorted(np.shape(const) for const in consts) == [(), (4,), (4, 4)]
    for eqn in jaxprs.all_eqns(got.jaxpr):
        for atom in eqn.invars:
            assert not (jaxprs.is_literal(atom) and np.ndim(atom.val))
            assert not avals.is_explicit(atom.aval)
    assert jax.typeof(placed) == placed.aval  # nothing is left behind


def test_consts_whatever_the_users_flag() -> None:
    big = jnp.arange(8.0)
    before = jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        got = traced(lambda x: x + big, 1.0)
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", before)
    assert len(jaxprs.consts_of(got.jaxpr)) == 1


def test_users_mesh_changes_nothing() -> None:
    mesh = jax.make_mesh((8,), ("x",))

    def f(x: Any) -> Any:
        return jnp.zeros((8, 2)).at[0].set(x)

    plain = traced(f, jnp.ones(2)).jaxpr
    with jax.set_mesh(mesh):
        meshed = traced(f, np.ones(2, np.float32)).jaxpr
        assert jax.sharding.get_mesh() == mesh
    assert str(plain) == str(meshed)


def test_bare_specs_become_our_constraints() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, P("batch", None))

    from multimesh._src.config import autoshard

    with autoshard():
        got = traced(inner, np.ones((4, 4), np.float32))
    found = [e for e in jaxprs.all_eqns(got.jaxpr) if e.primitive is constraint_p]
    assert [e.params["dims"] for e in found] == [(("batch",), ())]


def test_shardings_on_the_global_mesh_give_specs_and_on_others_places() -> None:
    whole = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))
    part = Mesh(whole.devices[1:], whole.axis_names)
    got = traced(
        lambda a, b, c: (a, b + c),
        *(np.ones((4, 4), np.float32) for _ in range(3)),
        mesh=whole,
        in_shardings=(P("data"), NamedSharding(part, P(None, "data")), None),
        out_shardings=(NamedSharding(whole, P("data")), NamedSharding(part, P())),
    )
    assert [a.spec for a in got.arguments] == [P("data"), P(None, "data"), None]
    assert [a.placement and a.placement.mesh for a in got.arguments] == [None, part, None]
    assert [r.sharding for r in got.results] == [
        NamedSharding(whole, P("data")),
        NamedSharding(part, P()),
    ]


def test_out_shardings_on_a_mesh_of_their_own_beat_succession() -> None:
    """A layout alone does not say where: a state stays where it is."""
    whole = Mesh(np.array(jax.devices()), ("data",))
    part = NamedSharding(Mesh(np.array(jax.devices()[4:]), ("data",)), P())
    state = [jnp.ones(8), jnp.ones(8), jnp.ones(8)]
    got = traced(lambda s: s, state, mesh=whole, out_shardings=[P("data"), None, part])
    assert [r.successor_of for r in got.results] == [0, 1, None]


def test_empty_and_none_trees() -> None:
    got = traced(lambda a, b: (None, a, {}), None, ())
    assert got.arguments == () and got.results == ()
    assert jax.tree.unflatten(got.out_tree, []) == (None, None, {})


# --- errors --------------------------------------------------------------------------------------


def test_argument_that_is_no_array() -> None:
    with pytest.raises(TraceError, match=r"argument `config\['mode'\]` of type `str`"):
        traced(lambda x, config: x, 1.0, {"mode": "train"})


def test_unhashable_static() -> None:
    with pytest.raises(TraceError, match="static argument `1` of type `list` is not hashable"):
        traced(lambda x, mode: x, 1.0, [1], static_argnums=1)


def test_unknown_static_name() -> None:
    with pytest.raises(TraceError, match=r"has no argument `mood`; its arguments are `x`, `mode`"):
        argument_spec(lambda x, mode: x, static_argnames="mood")


def test_static_and_donated() -> None:
    with pytest.raises(TraceError, match="both static and donated"):
        argument_spec(lambda x, mode: x, static_argnames="mode", donate_argnums=1)


def refused_shardings(fun: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ShardingError) as caught:
        traced(fun, *args, **options)
    return str(caught.value)


def test_shardings_of_another_number_of_arguments_or_results() -> None:
    text = refused_shardings(lambda x, y: x, 1.0, 2.0, in_shardings=(None, None, None))
    assert text.startswith(
        "`in_shardings` has `3` entries, but there are `2` positional arguments that are not static"
    )
    assert "by keyword have no `in_shardings`, as in `jax.jit`" in text
    text = refused_shardings(lambda x: (x, x), 1.0, out_shardings=[None])
    assert text.startswith("`out_shardings` has `1` entries, but there are `2` results.\n")
    assert "keyword" not in text


@pytest.mark.parametrize(
    ("shardings", "problem"),
    [
        (({"w": None},), "`in_shardings[0]` is a `dict` with the keys `'w'`, but there the "),
        (({"w": None, "b": (None,)},), "`in_shardings[0]['b']` is a `tuple` of `1`, but there "),
        (({"w": [None, None], "b": None},), "have an array"),
        (((None, None),), "arguments have a `dict` with the keys `'w'`, `'b'`.\n"),
    ],
)
def test_shardings_that_are_no_prefix(shardings: Any, problem: str) -> None:
    params = {"w": jnp.ones(4), "b": [1.0, 2.0]}
    text = refused_shardings(lambda p: p, params, in_shardings=shardings)
    assert "`in_shardings` is not a prefix of the arguments: " in text
    assert problem in text


def test_spec_without_a_mesh() -> None:
    with pytest.raises(ShardingError, match="no global mesh whose axes"):
        traced(lambda x: x, jnp.ones(4), in_shardings=P("data"))


def test_spec_with_an_unknown_axis() -> None:
    whole = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ShardingError, match=r"names axis `model`.*has `data`"):
        traced(lambda x: x, jnp.ones(4), mesh=whole, out_shardings=P("model"))


def test_spec_longer_than_the_rank() -> None:
    whole = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(ShardingError, match="rank `1`"):
        traced(lambda x: x, jnp.ones(4), mesh=whole, in_shardings=P(None, "data"))


def test_failed_trace_leaves_nothing_behind() -> None:
    original = jax.lax.with_sharding_constraint.__code__

    def bad(x: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        traced(bad, 1.0)
    assert jax.lax.with_sharding_constraint.__code__ is original
    mesh = mesh_of(slice(0, 2), explicit=True)
    assert avals.is_explicit(jax.device_put(np.ones(4), NamedSharding(mesh, P("x"))).aval)
    assert avals.is_explicit(jax.typeof(jax.device_put(np.ones(4), NamedSharding(mesh, P("x")))))
