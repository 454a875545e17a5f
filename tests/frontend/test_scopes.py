"""Scopes as real JAX programs produce them, and the folding of repetitions."""

import jax
import jax.numpy as jnp
import pytest

from multimesh._src.frontend.scopes import ambient_scope, scope_of_equation
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import name_stack
from multimesh._src.jax_compat.name_stack import Component, parse_components


def walk(jaxpr, outer: Scope):
    """Yields (primitive, joined scope) of all equations at any depth."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        scope = outer.join(scope_of_equation(eqn))
        yield eqn.primitive.name, scope
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from walk(inner, scope)


def scopes(fun, *args, ambient: Scope | None = None) -> set[tuple[str, int]]:
    """The distinct (path, transposes) of what `fun` computes, call equations left out."""
    calls = {"scan", "jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "cond", "while"}
    found = walk(jax.make_jaxpr(fun)(*args), ambient or Scope())
    return {(str(scope), scope.transposes) for name, scope in found if name not in calls}


def block(x):
    with jax.named_scope("blk"):
        return jnp.tanh(x)


@jax.custom_vjp
def with_vjp(x):
    return block(x)


def _backward(saved, g):
    with jax.named_scope("bwd"):
        return (g * jnp.cos(saved),)


with_vjp.defvjp(lambda x: (block(x), x), _backward)


@jax.custom_jvp
def with_jvp(x):
    return block(x)


@with_jvp.defjvp
def _(primals, tangents):
    with jax.named_scope("rule"):
        return block(primals[0]), jnp.cos(primals[0]) * tangents[0]


X = jnp.ones((2, 3))
BODIES = {
    "plain": block,
    "jit": jax.jit(block),
    "remat": jax.checkpoint(block),
    "remat of jit": jax.checkpoint(jax.jit(block)),
    "remat of remat": jax.checkpoint(jax.checkpoint(block)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (block(c), None), x, None, length=2)[0],
    "remat in scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.checkpoint(block)(c), None), x, None, length=2
    )[0],
    "vmap": lambda x: jax.vmap(block)(x),
    "vmap of remat": lambda x: jax.vmap(jax.checkpoint(block))(x),
}


def loss_of(body):
    def loss(x):
        with jax.named_scope("top"), jax.named_scope("layer1"):
            y = body(x)
        return y.sum()

    return loss


@pytest.mark.parametrize("name", BODIES)
def test_gradient_stands_under_the_path_of_the_forward_pass(name):
    found = scopes(jax.value_and_grad(loss_of(BODIES[name])), X)
    inside = {scope for scope in found if scope[0].startswith("top")}
    paths = {path for path, _ in inside}
    assert paths <= {"top/layer1", "top/layer1/blk"}
    assert ("top/layer1/blk", 0) in inside
    assert ("top/layer1/blk", 1) in inside
    assert {count for _, count in found} == {0, 1}


@pytest.mark.parametrize(("body", "own"), [(with_vjp, "bwd"), (with_jvp, "rule")])
def test_custom_derivatives(body, own):
    found = scopes(jax.value_and_grad(loss_of(body)), X)
    assert (f"top/layer1/{own}", 1) in found
    assert {path for path, _ in found if path.count("layer1") > 1} == set()


@pytest.mark.parametrize("name", ["plain", "remat", "vmap of remat", "jit"])
def test_second_order_counts_two_transposes(name):
    inner = jax.grad(loss_of(BODIES[name]))
    found = scopes(jax.grad(lambda x: (inner(x) ** 2).sum()), X)
    inside = {scope for scope in found if scope[0].startswith("top")}
    assert {path for path, _ in inside} <= {"top/layer1", "top/layer1/blk"}
    assert {count for path, count in inside if path == "top/layer1/blk"} == {0, 1, 2}


def test_grad_inside_a_scope():
    def fun(x):
        with jax.named_scope("outer"):
            return jax.grad(lambda x: block(x).sum())(x)

    assert {("outer/blk", 0), ("outer/blk", 1)} <= scopes(fun, X)


def test_grad_of_jitted_function_has_its_transpose_outside():
    found = scopes(jax.grad(jax.jit(lambda x: block(x).sum())), X)
    assert ("blk", 1) in found


def test_ambient_scope():
    assert ambient_scope() == Scope()
    with jax.named_scope("a"), jax.named_scope("b/c"):
        assert ambient_scope() == Scope(("a", "b", "c"))
        found = scopes(block, X, ambient=ambient_scope())
    assert found == {("a/b/c/blk", 0)}


def test_markers_are_no_names():
    def loss(x):
        with jax.named_scope("multimesh:microbatch:3"), jax.named_scope("layer0"):
            return with_jvp(x).sum()

    found = dict.fromkeys(s for _, s in walk(jax.make_jaxpr(jax.grad(loss))(X), Scope()))
    assert all(scope.path[:1] in [("layer0",), ()] for scope in found)
    assert {scope.markers for scope in found} == {("multimesh:microbatch:3",)}


def test_join_of_nested_markers():
    outer = Scope(("a",), 0, ("multimesh:microbatch:0",))
    inner = Scope(("b",), 1, ("multimesh:microbatch:0", "multimesh:task:1"))
    joined = outer.join(inner)
    assert joined == Scope(("a", "b"), 1, ("multimesh:microbatch:0", "multimesh:task:1"))


def test_join_folds_only_behind_a_wrapper():
    outer = Scope(("top", "layer1"))
    assert outer.join(Scope(("layer1", "blk"))).path == ("top", "layer1", "layer1", "blk")
    wrapped = Scope(("layer1", "blk"), wrapped=True)
    assert outer.join(wrapped).path == ("top", "layer1", "blk")
    assert Scope().join(wrapped).wrapped
    assert outer.join(Scope()) == outer


def test_users_own_repetitions_stay():
    def fun(x):
        with jax.named_scope("layer"), jax.named_scope("layer"):
            return jnp.sin(x)

    assert scopes(fun, X) == {("layer/layer", 0)}


@pytest.mark.parametrize("name", ["plain", "remat", "vmap of remat", "scan"])
def test_parsing_the_text_gives_the_same_components(name):
    def check(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            stack = eqn.source_info.name_stack
            assert parse_components(str(stack)) == name_stack.components(stack)
            for param in eqn.params.values():
                if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                    check(param)

    check(jax.make_jaxpr(jax.value_and_grad(loss_of(BODIES[name])))(X))


def test_parse_components():
    assert parse_components("transpose(jvp(layer0))/attn") == (
        Component("transpose", True),
        Component("jvp", True),
        Component("layer0", False),
        Component("attn", False),
    )
    assert parse_components("") == ()


def test_source_line():
    jaxpr = jax.make_jaxpr(block)(X)
    assert "test_scopes.py:" in name_stack.source_line(jaxpr.eqns[0])
