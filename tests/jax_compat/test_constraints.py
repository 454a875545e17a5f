"""JAX's constraints taken over while we trace. Needs one device."""

import inspect
import threading

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.lax import with_sharding_constraint as held
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.frontend import logical
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.jax_compat import constraints, name_stack

X = np.ones((4, 2), np.float32)


def ours(x, shardings):
    return ("ours", shardings)


def test_every_reference_is_redirected_and_put_back():
    code = held.__code__
    with constraints.redirect_constraints(ours):
        assert constraints.is_redirected()
        assert held(X, P("a")) == ("ours", P("a"))
        assert jax.lax.with_sharding_constraint(x=X, shardings=P("b")) == ("ours", P("b"))
    assert held.__code__ is code and not constraints.is_redirected()
    with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
        held(X, P("a"))


def test_nested_redirects_end_with_the_outermost():
    code = held.__code__
    with constraints.redirect_constraints(ours):
        with constraints.redirect_constraints(lambda x, s: "inner"):
            assert held(X, None) == "inner"
        assert held(X, None) == ("ours", None)
    assert held.__code__ is code


def test_an_exception_puts_everything_back():
    code = held.__code__
    with pytest.raises(KeyError), constraints.redirect_constraints(ours):
        raise KeyError
    assert held.__code__ is code and not constraints.is_redirected()


def test_other_threads_keep_the_original():
    errors = []

    def other():
        try:
            held(X, P("a"))
        except RuntimeError as error:
            errors.append(str(error))

    with constraints.redirect_constraints(ours):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "requires a non-empty mesh" in errors[0]


def test_threads_that_overlap():
    entered, leave = threading.Event(), threading.Event()
    seen = []

    def other():
        with constraints.redirect_constraints(lambda x, s: "other"):
            entered.set()
            leave.wait(10)
            seen.append(held(X, None))

    code = held.__code__
    thread = threading.Thread(target=other)
    with constraints.redirect_constraints(ours):
        thread.start()
        entered.wait(10)
    assert held.__code__ is not code
    leave.set()
    thread.join()
    assert seen == ["other"] and held.__code__ is code


def test_the_original_can_be_called_inside():
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    with constraints.redirect_constraints(ours):
        out = constraints.call_original(X, NamedSharding(mesh, P("a")))
        assert constraints.is_redirected()
    assert out.sharding.spec == P("a")


@pytest.mark.parametrize("names", [("batch", None), P("batch", None)])
def test_flax_names_without_rules(names):
    with constraints.redirect_constraints(ours):
        assert nn.with_logical_constraint(X, names) == ("ours", P("batch", None))
    assert nn.with_logical_constraint(X, names) is X


def test_flax_prefixes():
    with constraints.redirect_constraints(ours):
        specs = nn.with_logical_constraint({"a": X, "b": X}, {"a": ("batch",), "b": None})[1]
    assert specs == {"a": P("batch"), "b": None}


def test_flax_rules_are_applied_first():
    with constraints.redirect_constraints(ours):
        assert nn.with_logical_constraint(X, ("batch", None), (("batch", "data"),)) == (
            "ours",
            P("data", None),
        )
        with nn.logical_axis_rules((("batch", "fsdp"),)):
            assert nn.with_logical_constraint(X, ("batch", None))[1] == P("fsdp", None)
    with nn.logical_axis_rules((("batch", "fsdp"),)):
        assert nn.with_logical_constraint(X, ("batch", None)) is X


def test_flax_boxes_are_constrained():
    box = nn.Partitioned(X, names=("in", "out"))
    with constraints.redirect_constraints(ours):
        assert box.unbox() == ("ours", P("in", "out"))
    assert box.unbox() is X


def test_signature_is_back():
    with constraints.redirect_constraints(ours):
        pass
    assert list(inspect.signature(held).parameters) == ["x", "shardings"]


def test_equations_carry_the_line_of_the_user():
    def f(x):
        return microbatch(lambda rows: rows.sum(), 0, 2)(held(x, P("batch")))

    with logical.redirect_constraints():
        traced = jax.make_jaxpr(f)(X)
    assert [eqn.primitive.name for eqn in traced.eqns][:2] == ["multimesh_constraint", "reshape"]
    for eqn in traced.eqns:
        assert __file__ in name_stack.source_line(eqn)
