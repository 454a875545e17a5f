"""Lending meshes to `shard_map` calls, and that nothing of it stays."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from multimesh._src.errors import PartitionError
from multimesh._src.frontend.matching import Match
from multimesh._src.frontend.shard_maps import mesh_called_for
from multimesh._src.frontend.tasks import Task
from multimesh._src.jax_compat import shard_maps
from multimesh._src.jax_compat.shard_maps import LentMesh, lending, lent_mesh

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
SLICE = Mesh(MESH.devices[1:], MESH.axis_names)
X = np.arange(8.0, dtype=np.float32)


def traced(f, given=MESH):
    """The equation of a `shard_map`, and what the lender was asked."""
    asked = []

    def lender(mesh, named):
        asked.append((mesh, named))
        return lent_mesh(SLICE, mesh, "stage=1", "here:1")

    with lending(lender):
        (eqn,) = jax.make_jaxpr(lambda x: f(x))(X).eqns  # a new function: no cached trace
    return eqn, asked


def make(body=lambda x: 2 * x, mesh=MESH):
    return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


@pytest.mark.parametrize("mesh", [MESH, None])
def test_lends_and_takes_back(mesh):
    f = make(mesh=mesh)
    for _ in range(2):  # JAX keeps the mesh of the first call
        eqn, asked = traced(f)
        assert asked == [(mesh, frozenset({"data"}))]
        assert isinstance(eqn.params["mesh"], LentMesh)
        assert eqn.params["jaxpr"].invars[0].aval.shape == (4,)
        assert eqn.outvars[0].aval.sharding.mesh.empty
    if mesh is not None:
        assert jax.make_jaxpr(lambda x: f(x))(X).eqns[0].params["mesh"] is MESH


def test_leaves_nothing_behind():
    def state():
        core, module = shard_maps.core, shard_maps.shard_map
        return core.unshard_aval_handlers[core.ShapedArray], module._check_specs_vs_args

    before = state()
    with pytest.raises(KeyError), lending(lambda mesh, named: 1 / 0):
        raise KeyError
    assert before == state()


def test_other_threads_are_left_alone():
    found = []

    def other():
        found.append(jax.make_jaxpr(make())(X).eqns[0])

    with lending(lambda mesh, named: lent_mesh(SLICE, mesh, "stage=1", "")):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found[0].params["mesh"] is MESH
    assert not found[0].outvars[0].aval.sharding.mesh.empty


def test_axes_that_a_body_names():
    def body(x):
        x = jax.lax.pcast(jax.lax.psum(x, "data"), "stage", to="varying")
        return jax.lax.scan(lambda c, _: (c + jax.lax.axis_index("stage"), None), x, None, 2)[0]

    eqn, _ = traced(jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("stage")))
    assert shard_maps.collective_axes(eqn) == {"data", "stage"}
    assert shard_maps.collective_axes(traced(make(lambda x: jnp.sin(x)))[0]) == frozenset()


def test_gradients_stay_on_the_lent_mesh():
    closed = []
    with lending(lambda mesh, named: lent_mesh(SLICE, mesh, "stage=1", "")):
        closed.append(jax.make_jaxpr(jax.grad(lambda x: make(jnp.sin)(x).sum()))(X))
    meshes = [eqn.params["mesh"] for eqn in closed[0].eqns if shard_maps.is_shard_map(eqn)]
    assert len(meshes) == 2
    assert all(isinstance(mesh, LentMesh) for mesh in meshes)
    asked = []
    body = shard_maps.on_submesh(closed[0], asked.append)
    plain = [eqn.params["mesh"] for eqn in body.eqns if shard_maps.is_shard_map(eqn)]
    assert all(type(m) is AbstractMesh and m.shape == SLICE.shape for m in plain)
    assert {mesh.label for mesh in asked} == {"stage=1"}


def test_a_scope_of_unlike_axes():
    eqn, _ = traced(make())
    other = Mesh(np.array(jax.devices()[:1]), ("data",))
    match = Match("t", "t", other, "device 0", (), None, Task())
    with pytest.raises(PartitionError, match=r"traced on the axes .* stands in `device 0`"):
        mesh_called_for(eqn, match, MESH)
    assert mesh_called_for(eqn, None, MESH) == (SLICE, "stage=1")
