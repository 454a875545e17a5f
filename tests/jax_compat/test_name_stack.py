"""Scopes around the bodies that JAX traces on their own."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from multimesh._src.frontend.scopes import scope_of
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import name_stack
from multimesh._src.jax_compat.name_stack import open_name_stacks, remember_outer_stacks

X = np.ones(4, np.float32)


def here() -> Scope:
    scope = Scope()
    for stack in open_name_stacks():
        scope = scope.join(scope_of(stack))
    return scope


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap])
@pytest.mark.parametrize("gradient", [False, True])
def test_all_enclosing_scopes_are_seen(around, gradient):
    seen = []

    def inner(x):
        with jax.named_scope("inner"):
            seen.append(str(here()))
            return jnp.sin(x)

    def outer(x):
        with jax.named_scope("outer"):
            return lax.scan(lambda x, _: (around(inner)(x), None), x, None, 2)[0].sum()

    with remember_outer_stacks():
        jax.make_jaxpr(jax.grad(outer) if gradient else outer)(X)
    assert set(seen) == {"outer/inner"}
    assert open_name_stacks() == (name_stack.ambient_name_stack(),)


def test_backward_of_a_custom_vjp():
    seen = []

    @jax.custom_vjp
    def f(x):
        return x * 2

    def backward(_, g):
        seen.append(here())
        return (g * 2,)

    f.defvjp(lambda x: (x * 2, None), backward)

    def loss(x):
        with jax.named_scope("outer"):
            return f(x).sum()

    with remember_outer_stacks():
        jax.make_jaxpr(jax.grad(loss))(X)
    assert [(str(scope), scope.backprop) for scope in seen] == [("outer", True)]


def test_contexts_inside_scopes():
    events = []

    @contextlib.contextmanager
    def note():
        scope = str(here())
        events.append(f"+{scope}")
        yield
        events.append(f"-{scope}")

    def fails():
        with jax.named_scope("b"):
            raise KeyError

    with (
        jax.named_scope("before"),
        remember_outer_stacks(note),
        jax.named_scope("a"),
        pytest.raises(KeyError),
    ):
        fails()
    with jax.named_scope("after"):
        pass
    assert events == ["+before/a", "+before/a/b", "-before/a/b", "-before/a"]


def test_the_users_line():
    assert name_stack.current_line().rsplit(":", 1)[0] == __file__
