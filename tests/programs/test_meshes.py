"""Submeshes of every kind, and arguments that lie anywhere (R6, R7, R9, R16, R17)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from multimesh._src.runtime.counters import since, snapshot
from multimesh.jax import MultiMesh, Task, TaskMesh, mjit, with_sharding_constraint
from tests.programs.plainly import assert_close, layer, normal, pipeline, square_loss, weights
from tests.programs.stepped import X, Y, check_by_oracle, descent, devices_of, train

BATCH = (X, Y)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def with_tasks(mesh, **tasks):
    """A MultiMesh with one task for each scope."""
    multi = MultiMesh(global_mesh=mesh)
    for scope, task in tasks.items():
        multi.register_task(scope, task=task)
    return multi


def grid(*sizes, names, axis_type=AUTO, devices=None):
    found = jax.devices()[: int(np.prod(sizes))] if devices is None else devices
    types = (axis_type,) * len(sizes)
    return Mesh(np.array(found).reshape(sizes), names, axis_types=types)


def unconstrained(x, spec):
    return x


def constrained_loss(*specs, constrain=with_sharding_constraint):
    """Layer i constrains its result to `specs[i]`, logical names."""

    def loss(params, batch):
        x, y = batch
        for number, (w, spec) in enumerate(zip(params, specs, strict=True)):
            with layer(number):
                x = constrain(jnp.tanh(x @ w), spec)
        return jnp.mean((x - y) ** 2)

    return loss


# --- submeshes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4])
def test_submeshes_with_axes_of_other_names_and_sizes(size):
    multi = with_tasks(
        grid(8, names=("all",)),
        layer0=Task(
            mesh=TaskMesh(devices=range(4), axis_sizes=(2, 2), axis_names=("data", "tensor")),
            logical_axes=(("batch", "data"), ("model", "tensor")),
        ),
        layer1=Task(
            mesh=TaskMesh(devices=[4, 6], axis_names=("x",)), logical_axes=(("model", "x"),)
        ),
        layer2=Task(mesh=TaskMesh(devices=[7]), logical_axes=()),
    )
    specs = P("batch", "model"), P("batch", "model"), P("batch")
    plain = descent(constrained_loss(*specs, constrain=unconstrained), size)
    step = descent(constrained_loss(*specs), size)
    params, _ = check_by_oracle(multi, step, weights(3), BATCH, plain=plain)
    assert [devices_of(w) for w in params] == [[0, 1, 2, 3], [4, 6], [7]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_submeshes_that_overlap_and_the_full_mesh_between_slices(schedule):
    mesh = grid(2, 2, 2, names=("stage", "data", "model"))
    multi = with_tasks(
        mesh,
        layer0=Task(mesh_slice={"stage": 0}),
        layer1=Task(mesh_slice={}),
        layer2=Task(mesh_slice={"data": 1}),
        layer3=Task(mesh_slice={"stage": 1}),
    )
    step = descent(square_loss, 2, schedule=schedule)
    params, _ = check_by_oracle(multi, step, weights(4), BATCH)
    places = [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 6, 7], [4, 5, 6, 7]]
    assert [devices_of(w) for w in params] == places


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_devices_in_any_order(axis_type):
    devices = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]]
    mesh = grid(2, 2, 2, names=("data", "stage", "model"), axis_type=axis_type, devices=devices)
    multi = with_tasks(
        mesh, layer0=Task(mesh_slice={"stage": 1}), layer1=Task(mesh_slice={"stage": 0})
    )
    specs = P("data", "model"), P("data")
    plain = descent(constrained_loss(*specs, constrain=unconstrained), 4)
    step = descent(constrained_loss(*specs), 4)
    params, _ = check_by_oracle(multi, step, weights(2), BATCH, plain=plain)
    assert [devices_of(w) for w in params] == [[2, 3, 4, 6], [0, 1, 5, 7]]
    assert {t for w in params for t in w.sharding.mesh.axis_types} == {axis_type}
    order = [d.id for d in params[0].sharding.mesh.devices.flat]
    assert order == [3, 6, 2, 4], "as in the user's mesh"


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("size", [0, 4])
def test_parameters_sharded_over_data(axis_type, size):
    multi = with_tasks(
        grid(2, 2, names=("stage", "data"), axis_type=axis_type),
        layer0=Task(mesh_slice={"stage": 0}),
        layer1=Task(mesh_slice={"stage": 1}),
    )
    sharded = NamedSharding(multi.global_mesh, P("data"))
    options = {"in_shardings": ([sharded] * 2, (sharded, sharded))}
    if axis_type is AUTO:
        options["out_shardings"] = ([sharded] * 2, None)
    params, _ = check_by_oracle(multi, descent(square_loss, size), weights(2), BATCH, **options)
    assert [devices_of(w) for w in params] == [[0, 1], [2, 3]]
    assert all(w.addressable_shards[0].data.shape == (2, 4) for w in params)


def attention_loss(constrain):
    def loss(params, batch):
        x, y = batch  # (batch, sequence, width)
        for number, (q, v) in enumerate(params):
            with layer(number):
                x = constrain(x, P("batch", "sequence", None))
                scores = jax.nn.softmax(jnp.einsum("bsd,de,bte->bst", x, q, x))
                x = x + jnp.einsum("bst,btd,de->bse", scores, x, v)
                x = constrain(x, P("batch", "sequence", None))
        return jnp.mean((x - y) ** 2)

    return loss


def test_sequences_sharded_by_extra_axes():
    extra = (("batch", "data"), ("sequence", "model"))
    multi = with_tasks(
        grid(2, 2, 2, names=("stage", "data", "model")),
        layer0=Task(mesh_slice={"stage": 0}, extra_axes=extra),
        layer1=Task(mesh_slice={"stage": 1}, extra_axes=extra),
    )
    state = [(normal(4, 4, seed=1), normal(4, 4, seed=2)), (normal(4, 4, seed=3), weights(1)[0])]
    batch = normal(4, 6, 4, seed=5), normal(4, 6, 4, seed=6)
    step = descent(attention_loss(with_sharding_constraint), 2)
    plain = descent(attention_loss(unconstrained), 2)
    check_by_oracle(multi, step, state, batch, plain=plain)

    def rows(params, x):
        with layer(0):
            return with_sharding_constraint(x * 2, P("batch", "sequence", None))

    with multi:
        result = mjit(rows)(state, batch[0])
    assert result.sharding.spec == P("data", "model", None)


def expert_loss(constrain):
    def loss(params, batch):
        x, y = batch
        balance = 0.0
        for number, (gate, experts) in enumerate(params):
            with layer(number):
                chosen = jax.nn.softmax(x @ gate)
                hidden = jnp.einsum("bd,edf->ebf", x, experts)
                hidden = constrain(jnp.tanh(hidden), P("expert", "batch", None))
                x = jnp.einsum("be,ebf->bf", chosen, hidden)
                balance += jnp.sum(jnp.mean(chosen, 0) ** 2)
        return jnp.mean((x - y) ** 2) + 0.01 * balance

    return loss


def test_experts_on_an_axis_of_their_own():
    pairs = (("expert", "expert"), ("batch", "data"))
    multi = with_tasks(
        grid(2, 2, 2, names=("stage", "data", "expert")),
        layer0=Task(mesh_slice={"stage": 0}, logical_axes=pairs),
        layer1=Task(mesh_slice={"stage": 1}, logical_axes=pairs),
    )
    state = [(normal(4, 4, seed=n), normal(4, 4, 4, seed=9 + n) / 2) for n in range(2)]
    in_shardings = tuple(NamedSharding(multi.global_mesh, spec) for spec in (P(), P("expert")))
    params, _ = check_by_oracle(
        multi,
        descent(expert_loss(with_sharding_constraint), 4),
        state,
        BATCH,
        plain=descent(expert_loss(unconstrained), 4),
        in_shardings=([in_shardings] * 2, None),
    )
    assert all(experts.addressable_shards[0].data.shape == (2, 4, 4) for _, experts in params)


# --- arguments -----------------------------------------------------------------------------------

PLACES = {
    "host": lambda multi: lambda w: w,
    "uncommitted": lambda multi: jnp.asarray,
    "one device": lambda multi: lambda w: jax.device_put(w, jax.devices()[6]),
    "single": lambda multi: lambda w: jax.device_put(w, SingleDeviceSharding(jax.devices()[1])),
    "replicated": lambda multi: on(multi.global_mesh, P()),
    "sharded over the stages": lambda multi: on(multi.global_mesh, P("stage")),
    "the other stage": lambda multi: on(multi.slice(stage=1), P("data")),
    "other axes": lambda multi: on(Mesh(np.array(jax.devices()[4:8]), ("z",)), P(None, "z")),
}


def on(mesh, spec):
    return lambda w: jax.device_put(w, NamedSharding(mesh, spec))


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("donate", [True, False])
def test_arguments_from_anywhere(name, donate):
    multi = pipeline(2, 2)
    place = PLACES[name](multi)
    params, _ = check_by_oracle(
        multi,
        descent(square_loss, 2),
        weights(2),
        tuple(map(place, BATCH)),
        place=lambda state: [place(w.copy()) for w in state],
        **({} if donate else {"donate_argnums": ()}),
    )
    assert [devices_of(w) for w in params] == [[0, 1], [2, 3]]


def test_donated_numpy_arrays_stay_the_users():
    multi = pipeline(2)
    with multi:
        step = mjit(descent(square_loss, 2), donate_argnums=0)
    params = weights(2)
    kept = [w.copy() for w in params]
    first = step(params, BATCH)
    for w, before in zip(params, kept, strict=True):
        np.testing.assert_array_equal(w, before)
    assert_close(step(params, BATCH), first)


def test_a_state_that_came_from_elsewhere_stays_in_place():
    multi = pipeline(2, 2)
    with multi:
        step = mjit(descent(square_loss, 2), donate_argnums=0)
    state = [on(multi.global_mesh, P())(w) for w in weights(2)]
    state, _ = step(state, BATCH)
    state, _ = step(state, BATCH)
    before = snapshot()
    for _ in range(3):
        state, _ = step(state, BATCH)
    grown = since(before)
    assert (grown.traces, grown.compiles, grown.argument_moves) == (0, 0, 0)


def test_explicit_axes_beside_values_placed_by_hand():
    mesh = grid(2, 2, names=("stage", "data"), axis_type=EXPLICIT)
    multi = with_tasks(
        mesh, layer0=Task(mesh_slice={"stage": 0}), layer1=Task(mesh_slice={"stage": 1})
    )
    other = NamedSharding(
        grid(2, names=("z",), axis_type=EXPLICIT, devices=jax.devices()[6:]), P("z")
    )
    step = train(lambda x: jax.device_put(x, other), 2)
    state = [on(mesh, P())(w) for w in weights(2)]
    check_by_oracle(
        multi,
        step,
        weights(2),
        BATCH,
        plain=train(lambda x: x, 2),
        place=lambda _: state,
    )
