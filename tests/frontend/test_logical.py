"""Logical shardings: resolution and constraints in programs. Needs 8 CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from multimesh._src import config
from multimesh._src.errors import ShardingError
from multimesh._src.frontend import logical
from multimesh._src.frontend.logical import (
    resolve_constraint,
    resolve_dims,
    resolve_mesh_dims,
    with_sharding_constraint,
)
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.ir.constraint import UNCONSTRAINED, constraint_p
from multimesh._src.jax_compat import jaxprs

SIZES = {"data": 2, "tensor": 4}
X = np.arange(32, dtype=np.float32).reshape(8, 4)
OPEN = UNCONSTRAINED


def constraints(fun, *args):
    traced = jax.make_jaxpr(fun)(*args)
    return [e.params for e in jaxprs.all_eqns(traced) if e.primitive is constraint_p]


# --- resolution ----------------------------------------------------------------------------------

B, M = ("batch",), ("model",)


@pytest.mark.parametrize(
    ("dims", "shape", "pairs", "expected"),
    [
        # names, None and unmapped names
        ((B, M), (8, 4), [("batch", "data"), ("model", "tensor")], (("data",), ("tensor",))),
        ((B, ()), (8, 4), [("batch", "data")], (("data",), ())),
        ((B, M), (8, 4), [("batch", "data")], (("data",), OPEN)),
        ((OPEN, B), (8, 4), [("batch", "data")], (OPEN, ("data",))),
        # one name on several axes, in the order of the pairs
        ((B,), (8,), [("batch", "tensor"), ("batch", "data")], (("tensor", "data"),)),
        # a mesh axis is used once per tensor: the first pair wins
        ((B, M), (8, 4), [("model", "data"), ("batch", "data")], (OPEN, ("data",))),
        # the same name in two dims: the first that fits
        ((B, B), (8, 4), [("batch", "data")], (("data",), OPEN)),
        ((B, B), (1, 4), [("batch", "data")], (OPEN, ("data",))),
        # over-sharding is skipped: more shards than elements
        ((B,), (1,), [("batch", "data")], (OPEN,)),
        ((B,), (2,), [("batch", "tensor"), ("batch", "data")], (("data",),)),
        ((B,), (4,), [("batch", "data"), ("batch", "tensor")], (("data",),)),
        # as many shards as elements are fine
        ((B,), (8,), [("batch", "data"), ("batch", "tensor")], (("data", "tensor"),)),
        # several names in a dim keep their order, whatever the order of the pairs
        ((("a", "b"),), (8,), [("b", "data"), ("a", "tensor")], (("tensor", "data"),)),
        # default pairs: each axis maps to itself
        ((("tensor",), ()), (8, 4), [("data", "data"), ("tensor", "tensor")], (("tensor",), ())),
    ],
)
def test_resolution(dims, shape, pairs, expected):
    assert resolve_dims(dims, shape, pairs, SIZES) == expected


def test_a_dim_that_does_not_divide():
    with pytest.raises(ShardingError) as error:
        resolve_dims((B, ()), (6, 4), [("batch", "tensor")], SIZES, where="task `layer0`")
    text = str(error.value)
    assert "dim 0 (`batch`) of an array of shape `(6, 4)` has `6` elements" in text
    assert "`4` shards (`tensor`=4)" in text and "at task `layer0`" in text
    assert "make the dim a multiple" in text


def test_a_pair_with_an_unknown_axis():
    with pytest.raises(ShardingError) as error:
        resolve_dims((B,), (8,), [("batch", "fsdp")], SIZES)
    text = str(error.value)
    assert "no axis `fsdp`, to which logical axis `batch` is mapped" in text
    assert "`data`=2, `tensor`=4" in text and "Task(logical_axes=...)" in text


def test_mesh_dims_are_checked():
    assert resolve_mesh_dims((("data",), OPEN), (8, 3), SIZES) == (("data",), OPEN)
    with pytest.raises(ShardingError, match="no axis `fsdp`"):
        resolve_mesh_dims((("fsdp",),), (8,), SIZES)
    with pytest.raises(ShardingError, match="has `3` elements"):
        resolve_mesh_dims((("data",),), (3,), SIZES)


def test_resolve_constraint():
    params = {"dims": (B, ()), "kind": "logical", "memory_kind": "device", "mesh": None}
    resolved = resolve_constraint(params, (8, 4), [("batch", "data")], SIZES)
    assert resolved == {**params, "dims": (("data",), ()), "kind": "resolved"}
    on_mesh = {**params, "dims": (("data",), ()), "kind": "mesh"}
    assert resolve_constraint(on_mesh, (8, 4), [("batch", "tensor")], SIZES) == resolved
    assert resolve_constraint(resolved, (8, 4), [], SIZES) == resolved


# --- constraints in programs ---------------------------------------------------------------------


@pytest.fixture
def multi_mesh():
    with MultiMesh(axis_sizes=(4, 2), axis_names=("stage", "data")) as entered:
        yield entered


def test_inside_a_multi_mesh_names_are_logical(multi_mesh):
    (params,) = constraints(lambda x: with_sharding_constraint(x, P("batch")), X)
    said = {"dims": (B, ()), "kind": "logical"}
    assert params == {**said, "memory_kind": None, "mesh": None, "put": False}


def test_autoshard_makes_names_logical():
    with config.autoshard():
        assert len(constraints(lambda x: with_sharding_constraint(x, P("batch")), X)) == 1


def test_elsewhere_it_is_jax():
    with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
        with_sharding_constraint(X, P("batch"))
    with config.autoshard(), config.ignore_transforms(), pytest.raises(RuntimeError):
        with_sharding_constraint(X, P("batch"))


def test_sharding_on_the_global_mesh_gives_mesh_axes(multi_mesh):
    sharding = NamedSharding(multi_mesh.global_mesh, P("data", P.UNCONSTRAINED))
    (params,) = constraints(lambda x: with_sharding_constraint(x, sharding), X)
    assert (params["dims"], params["kind"], params["mesh"]) == ((("data",), OPEN), "mesh", None)


def test_axis_types_do_not_count(multi_mesh):
    types = (AxisType.Explicit,) * 2
    explicit = Mesh(multi_mesh.global_mesh.devices, ("stage", "data"), axis_types=types)
    assert logical.same_mesh(explicit, multi_mesh.global_mesh)
    assert logical.same_mesh(explicit.abstract_mesh, multi_mesh.global_mesh)


def test_sharding_on_another_mesh_places(multi_mesh):
    mesh = Mesh(np.array(jax.devices()[2:4]), ("x",))
    sharding = NamedSharding(mesh, P("x"), memory_kind=jax.devices()[0].default_memory().kind)
    (params,) = constraints(lambda x: with_sharding_constraint(x, sharding), X)
    assert params["mesh"] == mesh and params["kind"] == "mesh"
    assert params["memory_kind"] == sharding.memory_kind


def test_a_single_device_places(multi_mesh):
    device = jax.devices()[3]
    sharding = jax.sharding.SingleDeviceSharding(device)
    (params,) = constraints(lambda x: with_sharding_constraint(x, sharding), X)
    assert list(params["mesh"].devices.flat) == [device] and params["dims"] == ((), ())


def test_prefix_trees(multi_mesh):
    def f(x):
        tree = {"a": x, "b": (x, x)}
        return with_sharding_constraint(tree, {"a": None, "b": P("batch")})

    assert [p["dims"] for p in constraints(f, X)] == [((), ()), (B, ()), (B, ())]


def test_tree_that_is_no_prefix(multi_mesh):
    with pytest.raises(ShardingError, match="are no prefix of the arrays"):
        with_sharding_constraint({"a": X}, {"b": P("batch")})


def test_spec_longer_than_the_array(multi_mesh):
    with pytest.raises(ShardingError) as error:
        with_sharding_constraint({"w": X}, P("a", "b", "c"))
    assert "has `3` entries but the array has `2` dims" in str(error.value)
    assert "at ['w']" in str(error.value)


def test_other_types_are_refused(multi_mesh):
    with pytest.raises(ShardingError, match="`'batch'` of type `str` cannot"):
        with_sharding_constraint(X, "batch")


def test_unreduced_specs_are_refused(multi_mesh):
    with pytest.raises(ShardingError, match="unreduced"):
        with_sharding_constraint(X, P("a", unreduced={"data"}))


def test_eager_shardings_move_the_array(multi_mesh):
    sharding = NamedSharding(multi_mesh.global_mesh, P("data"))
    assert with_sharding_constraint(X, sharding).sharding == sharding
    np.testing.assert_array_equal(with_sharding_constraint(X, P("batch")), X)


def test_gradients_and_keys(multi_mesh):
    def f(x):
        return jnp.sin(with_sharding_constraint(x, P("batch"))).sum()

    assert len(constraints(jax.grad(f), X)) == 2
    keys = jax.random.split(jax.random.key(0), 8)
    assert constraints(lambda k: with_sharding_constraint(k, P("batch")), keys)[0]["dims"] == (B,)


def test_redirected_jax_constraints_are_ours():
    def f(x):
        return jax.lax.with_sharding_constraint(x, P("batch", None))

    with logical.redirect_constraints():
        (params,) = constraints(jax.jit(lambda x: f(x)), X)
    assert params["dims"] == (B, ()) and params["kind"] == "logical"


def test_absorb_constraints_traced_before():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("stage", "data"))
    other = Mesh(np.array(jax.devices()[:2]), ("data",))

    def constrained(m):
        return jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(m, P("data"))))

    def f(x):
        return constrained(other)(constrained(mesh)(x))

    absorbed = logical.absorb_constraints(jax.make_jaxpr(f)(X), mesh)
    eqns = list(jaxprs.all_eqns(absorbed))
    params = [e.params for e in eqns if e.primitive is constraint_p]
    assert [p["mesh"] for p in params] == [None, other]
    assert not any(e.primitive.name == "sharding_constraint" for e in eqns)


def test_absorbed_specs_on_an_abstract_mesh_are_logical():
    abstract = AbstractMesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(abstract):
        traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, P("batch")))(X)
    (eqn,) = logical.absorb_constraints(traced, None).eqns
    assert eqn.params["kind"] == "logical" and eqn.params["dims"] == (B, ())


def test_none_in_the_tree_is_no_array_and_among_the_specs_is_replicated():
    tree = {"a": X, "b": None, "c": (X, X)}
    with config.autoshard():
        same = with_sharding_constraint(tree, P("batch"))
        assert same["b"] is None and same["a"].shape == X.shape
        found = constraints(
            lambda t: with_sharding_constraint(t, {"a": P("batch"), "b": P("x"), "c": None}), tree
        )
    assert [params["dims"] for params in found] == [(("batch",), ()), ((), ()), ((), ())]
