"""Programs that state shardings in the types of their values (R17)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.errors import ShardingError
from multimesh.jax import Context, MultiMesh, Task, mjit
from tests.programs.plainly import pipeline, weights
from tests.programs.stepped import X, Y, check_by_oracle, devices_of, forward, same, train

OTHER = NamedSharding(Mesh(np.array(jax.devices()[6:8]), ("z",)), P("z"))


def run(fun, multi=None):
    with multi or pipeline(2, 2):
        return mjit(fun)(weights(2), X)


TYPED = {
    "einsum": lambda x: jnp.einsum("ij,jk->ik", x, jnp.eye(4), out_sharding=P("data")),
    "dot": lambda x: jnp.dot(x, jnp.eye(4), out_sharding=P(None, "data")),
    "zeros": lambda x: x + jnp.zeros(x.shape, out_sharding=P("data")),
    "reshape": lambda x: lax.reshape(x, (x.size,), out_sharding=P("data")).reshape(x.shape),
    "gather": lambda x: x.at[jnp.arange(x.shape[0])].get(out_sharding=P("data")),
    "auto_axes": lambda x: jax.sharding.auto_axes(
        lambda y: y * 1.0, axes="data", out_sharding=P("data")
    )(x),
    "explicit_axes": lambda x: jax.sharding.explicit_axes(
        lambda y: y * 1.0, axes="data", in_sharding=P("data")
    )(x),
    "reshard": lambda x: jax.sharding.reshard(jnp.dot(x, jnp.eye(4), out_sharding=P("data")), P()),
}


def explicit_pipeline():
    multi = pipeline(2, 2)
    axis_types = (AxisType.Explicit,) * 2
    mesh = Mesh(multi.global_mesh.devices, multi.global_mesh.axis_names, axis_types=axis_types)
    explicit = MultiMesh(global_mesh=mesh)
    explicit.register_task(
        r"layer\d+",
        callback=lambda name, _: Task(name=name, mesh_slice={"stage": int(name[5:])}),
    )
    return explicit


@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize(("make", "size"), [(pipeline, 0), (pipeline, 2), (explicit_pipeline, 2)])
def test_programs_that_state_shardings_in_types(name, make, size):
    multi = make() if make is explicit_pipeline else make(2, 2)
    step, plain = train(TYPED[name], size), train(same, size)
    check_by_oracle(multi, step, weights(2), (X, Y), plain=plain, steps=2)


def nested(dot):
    """Sharded products, and jits inside, in a scan, a branch and a remat region."""

    def between(x):
        def body(x, _):
            return jnp.where(x > 0, jnp.tanh(dot(x)), x), None

        x, _ = lax.scan(body, dot(x), None, length=2)
        x = lax.cond(x.sum() > 0, lambda x: jnp.clip(x, -1, 1), lambda x: x * 2, x)
        return jax.checkpoint(lambda x: jnp.where(x > 0, x, jnp.sin(dot(x))))(x)

    return between


@pytest.mark.parametrize("size", [0, 2])
def test_shardings_stated_inside_control_flow(size):
    plain = train(nested(lambda x: jnp.einsum("ij,jk->ik", x, jnp.eye(4))), size)
    step = train(nested(TYPED["einsum"]), size)
    check_by_oracle(pipeline(2, 2), step, weights(2), (X, Y), plain=plain, steps=1)


def test_a_stated_sharding_is_kept():
    result = run(lambda p, x: TYPED["einsum"](forward(same)(p, x)))
    assert result.sharding.spec == P("data", None)
    assert devices_of(result) == [2, 3]


def test_stated_shardings_on_unlike_submeshes():
    devices = np.array(jax.devices())
    multi = MultiMesh(global_mesh=Mesh(devices.reshape(4, 2), ("all", "data")))
    slices = {"layer0": {"all": 0}, "layer1": {"all": [1, 2]}}
    multi.register_task(
        r"layer\d+", callback=lambda name, _: Task(name=name, mesh_slice=slices[name])
    )
    step, plain = train(TYPED["einsum"], 2), train(same, 2)
    check_by_oracle(multi, step, weights(2), (X, Y), plain=plain, steps=1)


# --- errors --------------------------------------------------------------------------------------


def error_of(between, multi=None):
    with pytest.raises(ShardingError) as caught:
        run(forward(between), multi)
    return str(caught.value)


def test_no_mesh_whose_axes_are_stated():
    text = error_of(TYPED["einsum"], Context())
    assert "no global mesh" in text and "test_stated_shardings.py:" in text


@pytest.mark.parametrize(
    "put",
    [
        lambda x: jnp.einsum("ij,jk->ik", x, jnp.eye(4), out_sharding=P("nowhere")),
        lambda x: jnp.dot(x, jnp.eye(4), out_sharding=P(None, "data")) @ TYPED["dot"](jnp.eye(4)).T,
        lambda x: jnp.dot(x, jnp.eye(4), out_sharding=OTHER),
    ],
)
def test_stated_shardings_that_do_not_fit(put):
    text = error_of(put)
    assert "do not fit" in text and "test_stated_shardings.py:" in text
    assert "`stage`=2, `data`=2" in text


def test_an_axis_that_a_submesh_lacks():
    multi = MultiMesh(global_mesh=Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "data")))
    meshes = [Mesh(np.array(jax.devices()[:2]), ("data",)), Mesh(np.array(jax.devices()[2:4]), "x")]
    multi.register_task(
        r"layer\d", callback=lambda name, _: Task(name=name, mesh=meshes[int(name[5:])])
    )

    def fun(params, x):
        y = forward(same)(params, x)
        with jax.named_scope("layer1"):
            return TYPED["einsum"](y)

    with pytest.raises(ShardingError, match="the submesh has no axis `data`") as caught:
        run(fun, multi)
    assert "task `layer1`" in str(caught.value)
    assert "test_stated_shardings.py:" in str(caught.value)
