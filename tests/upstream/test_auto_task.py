"""The original's tests of registered tasks, those that it skips or leaves inactive included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh.jax import (
    Context,
    MultiMesh,
    Task,
    autoshard,
    context,
    mjit,
    task,
    with_sharding_constraint,
)
from tests.upstream.harness import compare_with_plain, device_ids, on

MESH = {"axis_sizes": (2, 1), "axis_names": ("x", "y")}
AXES = (("batch", "x"), ("model", "y"))
X = np.arange(16, dtype=np.float32).reshape(4, 4) / 8


def two_tasks(x: Any, constrain: Any = with_sharding_constraint) -> Any:
    with jax.named_scope("task0"):
        x = constrain(x, P("batch", "model"))
        x = x * jnp.sin(x)
    with jax.named_scope("task1"):
        x = constrain(x, P("batch", None))
        return x * x


def plain_two_tasks(x: Any) -> Any:
    return two_tasks(x, lambda x, _: x)


def check_two_tasks(registered: Context) -> None:
    with registered, autoshard():
        lowered = mjit(two_tasks).lower(X)
        assert lowered.program is not None
        ((place,), _) = lowered.compile().input_shardings
        compare_with_plain(two_tasks, X, submesh=(2, 1), plain=plain_two_tasks)
    expected = NamedSharding(place.mesh, P("x", "y"))
    assert place.is_equivalent_to(expected, 2)
    assert {device.id for device in place.device_set} == {0, 1}


def test_register_task() -> None:
    made = Context()
    for name in ("task0", "task1"):
        made.register_task(
            name, callback=lambda text, _: Task(mesh=on(0, (2, 1), ("x", "y")), logical_axes=AXES)
        )
    check_two_tasks(made)


def test_register_task_context() -> None:
    made = Context()
    for name in ("task0", "task1"):
        made.register_task(name, task=Task(mesh=on(0, (2, 1), ("x", "y")), logical_axes=AXES))
    with context(autoshard=True):
        check_two_tasks(made)


def test_register_factory() -> None:
    multi_mesh = MultiMesh(**MESH, devices=jax.devices()[:2])
    multi_mesh.register_task(
        r"(task\d+)", callback=lambda name, _: Task(name, mesh_slice={}, logical_axes=AXES)
    )
    check_two_tasks(multi_mesh)


def test_fully_replicated_sharding() -> None:
    """The derived shardings of the submesh are a fixed point."""
    made = Context()
    made.register_task(r"task\d+", task=Task(mesh=on(0, (2,)), logical_axes=(("batch", "x"),)))

    def f(x: Any, y: Any) -> Any:
        with jax.named_scope("task0"):
            y = with_sharding_constraint(y, P(None, None))
            z = with_sharding_constraint(x, P("batch", None)) @ y
        with jax.named_scope("task1"):
            return z @ y

    with made, autoshard():
        (first, _) = mjit(f).lower(X, X).compile().input_shardings
        again = mjit(f, in_shardings=first).lower(X, X).compile()
        (second, _) = again.input_shardings
        result = again(X, X)
    assert first[1].is_fully_replicated and not first[0].is_fully_replicated
    for a, b in zip(first, second, strict=True):
        assert a.is_equivalent_to(b, 2)
    np.testing.assert_allclose(result, X @ X @ X, rtol=1e-5)


def layers(x: Any, w: Any, constrain: Any = with_sharding_constraint) -> Any:
    with jax.named_scope("layer0"):
        x = constrain(x, P("batch", None)) @ w
    with jax.named_scope("layer1"):
        return constrain(x, P("batch", None)) @ w


def plain_layers(x: Any, w: Any) -> Any:
    return layers(x, w, lambda x, _: x)


def test_reshard_argument() -> None:
    """One layer on four devices, the next on two."""
    made = Context()
    axes = (("batch", "x"),)
    made.register_task("layer0", task=Task(mesh=on(0, (4,)), logical_axes=axes))
    made.register_task("layer1", task=Task(mesh=on(4, (2,)), logical_axes=axes))
    with autoshard():
        result = compare_with_plain(
            layers, X, X + 1, context=made, submesh=(4,), plain=plain_layers
        )
    assert device_ids(result) == {4, 5}


def test_reshard_explicitly_sharded_argument() -> None:
    """A batch over four devices goes to explicit tasks on two each, by mjit and by plain jit."""
    mesh = on(0, (2,))
    axes = (("batch", "x"),)
    layer0 = task(lambda x, w: x @ w, "layer0", mesh=mesh, logical_axes=axes)
    layer1 = task(lambda x, w: x @ w, "layer1", mesh=mesh.place((2, 3)), logical_axes=axes)
    whole = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P("x"))
    batch = jax.device_put(X, whole)
    result = compare_with_plain(lambda x, w: layer1(layer0(x, w), w), batch, X + 1, submesh=(2,))
    assert device_ids(result) == {2, 3}


def test_auto_shard_multiple_axes() -> None:
    """Embeddings on eight devices, a layer on four; one dim sharded by two names."""
    made = Context()
    axes = (("batch", "x"), ("model", "y"))
    made.register_task("embeddings", task=Task(mesh=on(0, (4, 2), ("x", "y")), logical_axes=axes))
    made.register_task("layer0", task=Task(mesh=on(0, (2, 2), ("x", "y")), logical_axes=axes))

    def f(table: Any, fc: Any, batch: Any, constrain: Any = with_sharding_constraint) -> Any:
        with jax.named_scope("embeddings"):
            batch = constrain(batch, P(("batch", "model")))
            hot = jax.nn.one_hot(batch, 8)
            x = jnp.einsum("bv,vm->bm", hot, table)
            x = constrain(x, P(("batch", "model"), None))
        with jax.named_scope("layer0"):
            fc = constrain(fc, P(None, "model"))
            return constrain(x @ fc, P("batch", "model"))

    def plain(table: Any, fc: Any, batch: Any) -> Any:
        return f(table, fc, batch, lambda x, _: x)

    rng = np.random.default_rng(0)
    table, fc = (rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    batch = np.arange(16, dtype=np.int32) % 8
    with autoshard():
        with made:
            compiled = mjit(f).lower(table, fc, batch).compile()
        result = compare_with_plain(f, table, fc, batch, context=made, submesh=(2, 2), plain=plain)
    _, fc_place, batch_place = compiled.input_shardings[0]
    assert {d.id for d in fc_place.device_set} == {0, 1, 2, 3}
    assert not fc_place.is_fully_replicated and fc_place.spec == P(None, "y")
    assert {d.id for d in batch_place.device_set} == set(range(8))
    assert not batch_place.is_fully_replicated
    assert device_ids(result) == {0, 1, 2, 3}


def test_reshard_initial_final() -> None:
    """Embeddings and loss on eight devices, layers on 0-3 and 4-7; gradients too."""
    made = Context()
    axes = (("batch", "x"),)
    made.register_task("(embeddings|loss)", task=Task(mesh=on(0, (8,)), logical_axes=axes))
    made.register_task("layer0", task=Task(mesh=on(0, (4,)), logical_axes=axes))
    made.register_task("layer1", task=Task(mesh=on(4, (4,)), logical_axes=axes))

    def f(params: Any, batch: Any) -> Any:
        with jax.named_scope("embeddings"):
            x = jax.nn.one_hot(batch, 8) @ params["table"]
        with jax.named_scope("layer0"):
            x = jnp.tanh(x @ params["w0"])
        with jax.named_scope("layer1"):
            x = jnp.tanh(x @ params["w1"])
        with jax.named_scope("loss"):
            return jnp.sum(x * x)

    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(8, 8)).astype(np.float32) / 3 for k in ("table", "w0", "w1")}
    batch = np.arange(16, dtype=np.int32) % 8
    made.register_task("update", task=Task(mesh=on(0, (8,))))
    with autoshard():
        _, grads = compare_with_plain(
            jax.value_and_grad(f), params, batch, context=made, submesh=(4,)
        )
    assert device_ids(grads["w0"]) == {0, 1, 2, 3}
    assert device_ids(grads["w1"]) == {4, 5, 6, 7}


def test_mesh_wrapper() -> None:
    """Layers on slices of a four-axis MultiMesh, constrained on the global mesh."""
    multi_mesh = MultiMesh(axis_sizes=(2, 2, 1, 2), axis_names=("stage", "a", "b", "c"))
    multi_mesh.register_task(
        r"layer(\d+)", callback=lambda text, _: Task(f"l{text}", mesh_slice={"stage": int(text)})
    )
    sharding = NamedSharding(multi_mesh.global_mesh, P("a", "c"))

    def constrain(x: Any, _: Any) -> Any:
        return with_sharding_constraint(x, sharding)

    result = compare_with_plain(
        lambda x, w: layers(x, w, constrain),
        X,
        X + 1,
        context=multi_mesh,
        submesh=(2, 2),
        plain=plain_layers,
    )
    assert device_ids(result) == {4, 5, 6, 7}
