"""Types lose meshes and memories; what is plain stays the same object."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P, use_abstract_mesh

from multimesh._src.jax_compat import jaxprs, plain_types

X = np.ones((8, 4), np.float32)
MESH = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def keep(eqn):
    return [eqn]


def looped(x):
    def body(x, _):
        return jnp.sin(x), None

    return jax.lax.scan(body, x, None, length=3)[0]


def test_a_plain_jaxpr_is_returned_itself():
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(jnp.tanh)(looped(x)))(X)
    assert plain_types.plainly_typed(jaxpr, keep) is jaxpr


def stated(x):
    x = jnp.dot(x, np.eye(4, dtype=np.float32), out_sharding=P("data", "model"))
    return jax.jit(looped)(x) * 2


def test_shardings_leave_types_params_and_contexts():
    with use_abstract_mesh(MESH):
        jaxpr = jax.make_jaxpr(stated)(X)
    specs = [plain_types.stated_specs(eqn) for eqn in jaxprs.all_eqns(jaxpr)]
    assert (P("data", "model"),) in specs
    plain = plain_types.plainly_typed(jaxpr, keep)
    for eqn in jaxprs.all_eqns(plain):
        assert all(plain_types.plain_type(var.aval) is var.aval for var in eqn.outvars), eqn
        assert eqn.ctx.cur_abstract_mesh.empty
        assert plain_types.stated_specs(eqn) == ()
    np.testing.assert_allclose(jaxprs.evaluate(plain, X)[0], looped(X) * 2, rtol=1e-6)


def test_memories_leave_types():
    def offloaded(x):
        return jax.device_put(jnp.sin(x), jax.memory.Space.Host)

    jaxpr = jax.make_jaxpr(offloaded)(X)
    assert "<host>" in str(jaxpr)
    plain = plain_types.plainly_typed(jaxpr, keep)
    assert [var.aval.str_short() for var in plain.jaxpr.outvars] == ["float32[8,4]"]
