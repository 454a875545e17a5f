"""The constraint primitive and its evaluation on a mesh. Needs 8 CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.ir.constraint import (
    UNCONSTRAINED,
    bind_constraint,
    constraint_p,
    dims_of,
    map_constraints,
    spec_of,
    with_mesh,
)
from multimesh._src.jax_compat import jaxprs

X = np.arange(32, dtype=np.float32).reshape(8, 4)
ROWS = (("x",), ())


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def rows(v, kind="resolved"):
    return bind_constraint(v, ROWS, kind)


def constraints(jaxpr):
    return [e.params for e in jaxprs.all_eqns(jaxpr) if e.primitive is constraint_p]


def lowered_text(jaxpr, mesh, *args):
    whole = NamedSharding(mesh, P())
    return jax.jit(with_mesh(jaxpr, mesh), in_shardings=whole).lower(*args).as_text()


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (P("a", None), (("a",), ())),
        (P(("a", "b")), (("a", "b"), ())),
        (P(P.UNCONSTRAINED, "a"), (UNCONSTRAINED, ("a",))),
        (P(), ((), ())),
    ],
)
def test_specs_and_dims(spec, dims):
    assert dims_of(spec, 2) == dims
    assert dims_of(spec_of(dims), 2) == dims


def test_it_is_the_identity_outside_a_mesh():
    np.testing.assert_array_equal(rows(X, "logical"), X)
    np.testing.assert_array_equal(jax.jit(rows)(X), X)


def test_derivatives_are_constrained_too():
    traced = jax.make_jaxpr(jax.grad(lambda v: jnp.sin(rows(v)).sum()))(X)
    assert [c["dims"] for c in constraints(traced)] == [ROWS, ROWS]
    primal, tangent = jax.jvp(rows, (X,), (X,))
    np.testing.assert_array_equal(primal, tangent)
    np.testing.assert_array_equal(jax.grad(lambda v: rows(v).sum())(X), np.ones_like(X))


def test_integers_have_no_derivative():
    assert jax.grad(lambda v, i: (v * rows(i)).sum())(X, np.ones((8, 4), np.int32)).shape == (8, 4)


def test_mapped_dim_is_open():
    traced = jax.make_jaxpr(jax.vmap(rows, in_axes=1, out_axes=1))(X[:, None])
    assert constraints(traced)[0]["dims"] == (("x",), UNCONSTRAINED, ())


def test_mapped_dim_takes_spmd_axis_name():
    mapped = jax.vmap(rows, spmd_axis_name="y")
    assert constraints(jax.make_jaxpr(mapped)(X[None]))[0]["dims"] == (("y",), ("x",), ())


def test_map_constraints_reaches_every_depth():
    def f(v):
        def body(c, s):
            inner = jax.checkpoint(lambda s: jnp.sin(rows(s, "logical")))
            return jax.lax.cond(True, jax.jit(inner), lambda s: s, c), None

        return jax.lax.scan(body, v, jnp.arange(2))[0]

    traced = jax.make_jaxpr(jax.grad(lambda v: f(v).sum()))(X)
    mapped = map_constraints(traced, lambda e: {**e.params, "kind": "resolved"})
    assert {c["kind"] for c in constraints(traced)} == {"logical"}
    assert {c["kind"] for c in constraints(mapped)} == {"resolved"}
    assert len(constraints(mapped)) == len(constraints(traced)) >= 2
    assert map_constraints(traced, lambda e: e.params) is traced


def test_with_mesh_constrains(mesh):
    traced = jax.make_jaxpr(rows)(X)
    (out,) = jax.jit(with_mesh(traced, mesh), in_shardings=NamedSharding(mesh, P()))(X)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    np.testing.assert_array_equal(out, X)


def test_with_mesh_constrains_inside_nested_jaxprs(mesh):
    def f(v):
        return jax.lax.scan(lambda c, _: (jax.jit(rows)(c + 1), None), v, length=2)[0]

    text = lowered_text(jax.make_jaxpr(f)(X), mesh, X)
    assert text.count("sdy.sharding_constraint") == 1


def test_open_dims_and_several_axes(mesh):
    def f(v):
        return bind_constraint(v, (("x", "y"), UNCONSTRAINED), "resolved")

    text = lowered_text(jax.make_jaxpr(f)(X), mesh, X)
    assert '[{"x", "y"}, {?}]' in text


@pytest.mark.parametrize("kind", ["logical", "mesh"])
def test_only_resolved_constraints_are_lowered(mesh, kind):
    text = lowered_text(jax.make_jaxpr(lambda v: rows(v, kind))(X), mesh, X)
    assert "sharding_constraint" not in text


def test_typed_keys(mesh):
    keys = jax.random.split(jax.random.key(0), 8)
    traced = jax.make_jaxpr(lambda k: bind_constraint(k, (("x",),), "resolved"))(keys)
    (out,) = jax.jit(with_mesh(traced, mesh), in_shardings=NamedSharding(mesh, P()))(keys)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 1)
    assert (out == keys).all()


def test_a_mesh_set_by_the_user_changes_nothing(mesh):
    traced = jax.make_jaxpr(rows)(X)
    run = jax.jit(with_mesh(traced, mesh), in_shardings=NamedSharding(mesh, P()))
    alone = run.lower(X).as_text()
    other = Mesh(np.array(jax.devices()[:8]), ("q",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(other):
        assert run.lower(X).as_text() == alone


@pytest.mark.parametrize(("axes", "expected"), [({"x"}, True), ({"x", "y"}, False)])
def test_manual_axes_are_left_out(mesh, axes, expected):
    def inner(v):
        return bind_constraint(v * 2, (("x",), ("y",)), "resolved")

    mapped = jax.shard_map(inner, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names=axes)
    traced = jax.make_jaxpr(mapped)(X)
    text = lowered_text(traced, mesh, X)
    assert ("sharding_constraint" in text and '[{}, {"y"}]' in text) == expected
    (out,) = jax.jit(with_mesh(traced, mesh), in_shardings=NamedSharding(mesh, P()))(X)
    np.testing.assert_array_equal(out, X * 2)


def test_with_mesh_keeps_name_stacks(mesh):
    def f(v):
        with jax.named_scope("layer0"):
            return jnp.sin(rows(v))

    traced = jax.make_jaxpr(f)(X)
    again = jax.make_jaxpr(with_mesh(traced, mesh))(X)
    assert [str(e.source_info.name_stack) for e in again.eqns] == ["layer0"] * 2


def test_memory_kind_is_kept(mesh):
    kind = jax.devices()[0].default_memory().kind

    def f(v):
        return bind_constraint(v, ROWS, "resolved", memory_kind=kind)

    (out,) = jax.jit(with_mesh(jax.make_jaxpr(f)(X), mesh), in_shardings=NamedSharding(mesh, P()))(
        X
    )
    assert out.sharding.memory_kind == kind
