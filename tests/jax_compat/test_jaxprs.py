"""Reading, building and rewriting jaxprs: the same on every version of JAX. Needs one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import cos_p, sin_p

from multimesh._src.jax_compat import jaxprs


def nested(c, xs, w):
    """Sines inside jit, cond, remat, while, custom_vjp and scan."""

    @jax.custom_vjp
    def custom(x):
        return jnp.sin(x)

    custom.defvjp(lambda x: (custom(x), x), lambda x, g: (g,))

    def body(c, x):
        y = jax.jit(lambda x: jnp.sin(x))(x) * w
        y = jax.lax.cond(y > 0, lambda y: jnp.sin(y), lambda y: y, y)
        y = jax.lax.while_loop(lambda y: y > 1, lambda y: jnp.sin(y), y)
        return (c[0] + custom(y), c[1] + 1), c[0]

    return jax.lax.scan(jax.checkpoint(body), c, xs, reverse=True)


ARGS = ((np.float32(1), np.int32(0)), np.arange(3, dtype=np.float32), np.float32(2))


@pytest.fixture
def traced():
    return jax.make_jaxpr(nested)(*ARGS)


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxprs.all_eqns(jaxpr)]


def cosine(eqn):
    return eqn.replace(primitive=cos_p) if eqn.primitive is sin_p else eqn


def test_all_eqns_goes_into_every_nested_jaxpr(traced):
    assert names(traced).count("sin") == 4
    assert "while" in names(traced) and "cond" in names(traced)


def test_scan_parts(traced):
    (scan,) = (e for e in jaxprs.all_eqns(traced) if e.primitive.name == "scan")
    parts = jaxprs.scan_parts(scan)
    assert parts[:4] == (1, 2, 3, True)
    assert len(parts.jaxpr.eqns) > 0


def test_map_eqns_rewrites_at_every_depth(traced):
    mapped = jaxprs.map_eqns(traced, cosine)
    assert names(mapped).count("cos") == 4 and names(mapped).count("sin") == 0
    assert names(traced).count("sin") == 4
    flat = jax.tree.leaves(ARGS)
    assert float(jaxprs.evaluate(mapped, *flat)[0]) != float(jaxprs.evaluate(traced, *flat)[0])


def test_map_eqns_without_change_is_the_same_object(traced):
    assert jaxprs.map_eqns(traced, lambda eqn: eqn) is traced


def test_map_eqns_keeps_shared_jaxprs_shared():
    inner = jax.jit(jnp.sin)
    traced = jax.make_jaxpr(lambda x: inner(inner(x)))(1.0)
    first, second = (e.params["jaxpr"] for e in jaxprs.map_eqns(traced, cosine).eqns)
    assert first is second


def test_map_sub_jaxprs_keeps_tuples(traced):
    (cond,) = (e for e in jaxprs.all_eqns(traced) if e.primitive.name == "cond")
    assert len(jaxprs.sub_jaxprs(cond.params)) == 2
    assert jaxprs.map_sub_jaxprs(cond, lambda j: j) is cond
    emptied = jaxprs.map_sub_jaxprs(cond, lambda j: jaxprs.with_eqns(j, ()))
    assert isinstance(emptied.params["branches"], tuple)
    assert all(not j.eqns for j in emptied.params["branches"])


def test_evaluate_equals_the_function(traced):
    results = jaxprs.evaluate(traced, *jax.tree.leaves(ARGS))
    for got, expected in zip(results, jax.tree.leaves(nested(*ARGS)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_evaluate_keeps_name_stacks():
    def f(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    traced = jax.make_jaxpr(f)(1.0)

    def g(x):
        with jax.named_scope("outer"):
            return jaxprs.evaluate(traced, x)

    (eqn,) = jax.make_jaxpr(g)(1.0).eqns
    assert str(eqn.source_info.name_stack) == "outer/inner"


def test_build_a_jaxpr():
    aval = jax.core.ShapedArray((2,), np.dtype(np.float32))
    const, x, y, z = (jaxprs.new_var(aval) for _ in range(4))
    two = jaxprs.literal(np.float32(2), jax.core.ShapedArray((), np.dtype(np.float32)))
    add = jax.make_jaxpr(jax.lax.add)(np.ones(2, np.float32), np.ones(2, np.float32)).eqns[0]
    add = jaxprs.replace_eqn(add, invars=[const, x], outvars=[y])
    scale = jax.make_jaxpr(lambda v: v * 2)(np.ones(2, np.float32)).eqns[-1]
    scaled = jaxprs.replace_eqn(scale, invars=[y, scale.invars[1]], outvars=[z])
    assert jaxprs.is_literal(two) and not jaxprs.is_literal(x)
    built = jaxprs.new_closed_jaxpr(
        [x], [z], [add, scaled], constvars=[const], consts=[np.ones(2, np.float32)]
    )
    assert jaxprs.consts_of(built)[0].shape == (2,)
    assert jaxprs.open_jaxpr(built).constvars == [const]
    np.testing.assert_array_equal(jaxprs.evaluate(built, np.float32([1, 2]))[0], [4, 6])


def test_build_with_missing_consts_is_refused():
    var = jaxprs.new_var(jax.core.ShapedArray((), np.dtype(np.float32)))
    with pytest.raises(ValueError, match="`1` constvars but `0` consts"):
        jaxprs.new_closed_jaxpr([], [var], [], constvars=[var])


def test_built_jaxprs_have_the_effects_of_their_equations():
    def f(x):
        jax.debug.print("{}", x)
        return x

    traced = jax.make_jaxpr(f)(1.0)
    opened = jaxprs.open_jaxpr(traced)
    built = jaxprs.new_jaxpr(opened.invars, opened.outvars, opened.eqns)
    assert built.effects == traced.effects and built.effects


def test_replaced_equations_carry_effects_along():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] = x + 1
        return ref[...]

    traced = jax.make_jaxpr(f)(1.0)
    write = next(e for e in traced.eqns if e.primitive.name == "swap")
    other = jaxprs.new_var(write.invars[0].aval)
    moved = jaxprs.replace_eqn(write, invars=[other, *write.invars[1:]])
    assert {eff.input for eff in moved.effects} == {other}
    assert {eff.input for eff in write.effects} == {write.invars[0]}


def test_fresh_equations_compute_the_same_in_other_variables():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2 + x)(1.0)
    jaxpr = jaxprs.open_jaxpr(closed)
    (x,) = jaxpr.invars
    env = {x: jaxprs.new_var(x.aval)}
    eqns = jaxprs.fresh_eqns(jaxpr.eqns, env)
    made = {var for eqn in eqns for var in eqn.outvars}
    assert made.isdisjoint(var for eqn in jaxpr.eqns for var in eqn.outvars)
    again = jaxprs.new_closed_jaxpr([env[x]], [env[var] for var in jaxpr.outvars], eqns)
    assert jaxprs.evaluate(again, 3.0) == jaxprs.evaluate(closed, 3.0)
