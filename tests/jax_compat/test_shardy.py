"""Sharding propagation without compiling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.jax_compat import shardy
from multimesh._src.jax_compat.shardy import propagate_shardings

FREE = P.UNCONSTRAINED


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 2), ("stage", "data", "model"))


def struct(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [x @ w]


X_W = (struct(8, 6), struct(6, 4))


def test_flows_from_arguments_to_results(mesh: Mesh) -> None:
    specs = propagate_shardings(matmul, X_W, mesh, (P("data"), P(None, "model")), (None,))
    assert specs == ((P("data"), P(None, "model")), (P("data", "model"),))


def test_flows_from_results_to_arguments(mesh: Mesh) -> None:
    specs = propagate_shardings(matmul, X_W, mesh, (None, None), (P("data", "model"),))
    assert specs == ((P("data", None), P(None, "model")), (P("data", "model"),))


def test_flows_from_constraints_inside(mesh: Mesh) -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("model")))
        return [y + 1]

    assert propagate_shardings(fn, [struct(4, 3)], mesh, [None], [None]) == (
        (P("model", None),),
        (P("model", None),),
    )


def test_unknown_is_replicated(mesh: Mesh) -> None:
    specs = propagate_shardings(matmul, X_W, mesh, (None, None), (None,))
    assert specs == ((P(None, None), P(None, None)), (P(None, None),))


def test_closed_dims_stop_propagation(mesh: Mesh) -> None:
    specs = propagate_shardings(matmul, X_W, mesh, (P("data"), P()), (P(),))
    assert specs == ((P("data"), P()), (P(),))
    specs = propagate_shardings(matmul, X_W, mesh, (P(None, None), None), (P(FREE, "model"),))
    assert specs == ((P(None, None), P(None, "model")), (P(None, "model"),))


def test_partly_free_specs_keep_their_given_dims(mesh: Mesh) -> None:
    in_specs, out_specs = propagate_shardings(
        matmul, X_W, mesh, (P("data", FREE), P("model", None)), (P(FREE, None),)
    )
    assert in_specs == (P("data", "model"), P("model", None))
    assert out_specs == (P("data", None),)


def test_given_axes_of_size_one_are_kept(mesh: Mesh) -> None:
    given = P(("stage", "data"), None)
    specs = propagate_shardings(lambda x: [x + 1], [struct(8, 6)], mesh, (given,), (None,))
    assert specs == ((given,), (P("data", None),))


def test_axes_that_come_in_part_are_cut(mesh: Mesh) -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        return [x.reshape(2, 4), x.reshape(2, 2, 2)]

    _, out_specs = propagate_shardings(fn, [struct(8)], mesh, (P(("data", "model")),), (None, None))
    assert out_specs[0] == P(None, None)
    assert out_specs[1] == P(None, None, "model")


def test_axes_that_do_not_divide_are_cut(mesh: Mesh) -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        return [x[:6], x[:3]]

    _, out_specs = propagate_shardings(fn, [struct(8)], mesh, (P(("model", "data")),), (None, None))
    for size, spec in zip((6, 3), out_specs, strict=True):
        NamedSharding(mesh, spec).shard_shape((size,))  # raises when uneven


def test_typed_keys_have_their_logical_rank(mesh: Mesh) -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))

    def fn(k: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [k, jax.random.split(k[0], 8), x]

    specs = propagate_shardings(
        fn, [keys, struct(4)], mesh, (P("data"), P("model")), (None, None, None)
    )
    assert specs[0] == (P("data"), P("model"))
    assert [len(spec) for spec in specs[1]] == [1, 1, 1]
    assert specs[1][2] == P("model")


def test_unused_arguments_stay(mesh: Mesh) -> None:
    specs = propagate_shardings(
        lambda a, b, c: [c],
        [struct(3), struct(8), struct(4)],
        mesh,
        (None, P("data"), None),
        [P("model")],
    )
    assert specs == ((P(None), P("data"), P("model")), (P("model"),))


def test_closed_jaxprs_and_scans(mesh: Mesh) -> None:
    def fn(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    avals = [struct(3, 4, 4), struct(8, 4)]
    closed = jax.make_jaxpr(fn)(*avals)
    _, out_specs = propagate_shardings(closed, avals, mesh, (P(), P("data")), (None,))
    assert out_specs == (P("data", None),)


def test_one_device_is_replicated() -> None:
    single = Mesh(np.array(jax.devices()[3:4]).reshape(1, 1), ("data", "model"))
    specs = propagate_shardings(matmul, X_W, single, (P("data"), None), (P(FREE, "model"),))
    assert specs == ((P("data"), P(None, None)), (P(None, "model"),))


def test_fixed_specs_need_no_tracing(mesh: Mesh) -> None:
    def never(*_: object) -> list[jax.Array]:
        raise AssertionError("traced")

    assert propagate_shardings(never, X_W, mesh, (P(), P("data")), (P(),)) == (
        (P(), P("data")),
        (P(),),
    )


def test_abstract_meshes_work() -> None:
    abstract = AbstractMesh((64, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = propagate_shardings(
        matmul, (struct(128, 6), struct(6, 4)), abstract, (P("data"), P(None, "model")), (None,)
    )
    assert specs[1] == (P("data", "model"),)


def test_ignores_the_flag_and_the_mesh_of_the_caller(mesh: Mesh) -> None:
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 3)
    with jax.sharding.set_mesh(explicit):
        specs = propagate_shardings(matmul, X_W, mesh, (P("data"), P()), (None,))
    assert specs[1] == (P("data", None),)


def test_compiles_nothing(mesh: Mesh) -> None:
    events: list[str] = []

    def listen(name: str, *_: object, **__: object) -> None:
        events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    propagate_shardings(matmul, X_W, mesh, (P("data"), P()), (None,))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert events
    assert not [name for name in events if "backend_compile" in name]


def test_compiles_where_the_passes_are_missing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardy, "_sdy", None)
    specs = propagate_shardings(matmul, X_W, mesh, (P("data"), P(None, "model")), (None,))
    assert specs[1] == (P("data", "model"),)
    specs = propagate_shardings(matmul, X_W, mesh, (P("data"), None), (None,))
    assert specs == ((P("data"), P(None, None)), (P("data", None),))
