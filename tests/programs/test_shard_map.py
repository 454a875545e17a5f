"""shard_map inside and between tasks: on slices, on the whole mesh, by hand (R16, R18)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from multimesh._src.errors import ShardingError
from multimesh._src.jax_compat import shard_maps as lending
from multimesh.jax import Context, MultiMesh, Task, TaskMesh, microbatch, mjit, shard_map
from tests.programs.measured import (
    X,
    Y,
    check,
    make_mesh,
    make_multi,
    make_step,
    submeshes_of,
    weights,
)
from tests.programs.plainly import layer

MESH = make_mesh()
ROWS = {"in_specs": (P(), P("data")), "out_specs": P("data")}


def mapped(f, mesh=MESH, **options):
    return jax.shard_map(f, mesh=mesh, **{**ROWS, **options})


def dense(w, x):
    return jnp.tanh(x @ w)


def with_collectives(w, x):
    x = jnp.tanh(x @ w)
    mean = lax.pmean(x.mean(0), "data")
    turned = lax.ppermute(x, "data", [(0, 1), (1, 0)])
    every = lax.all_gather(x, "data").sum((0, 1))
    part = lax.psum_scatter(every.repeat(2, 0) * x.sum(), "data", tiled=True)
    return x - mean + 0.5 * turned + 0.01 * part.sum() + lax.axis_index("data")


def with_mean(w, x):
    return jnp.tanh(x @ w) + lax.pmean(x.mean(), "data") * lax.axis_index("data")


def on_slices(compiled):
    return submeshes_of(compiled) == {"stage=0", "stage=1"}


# --- inside a task -------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("body", [dense, with_collectives])
def test_global_mesh_means_the_slice(body, check_vma):
    compiled = check(
        make_multi(MESH), make_step(mapped(body, check_vma=check_vma)), weights(), (X, Y)
    )
    assert on_slices(compiled)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("make", [jax.shard_map, shard_map])
def test_without_a_mesh(make, explicit):
    @functools.partial(make, **ROWS)  # made before any mesh is known
    def block(w, x):
        return with_mean(w, x)

    mesh = make_mesh(explicit=explicit)
    plain = make_mesh()
    compiled = check(make_multi(mesh), make_step(block), weights(), (X, Y), plain=plain)
    assert on_slices(compiled)


def test_explicit_axes():
    mesh = make_mesh(explicit=True)
    step, reference = (make_step(mapped(with_mean, m)) for m in (mesh, MESH))
    assert on_slices(check(make_multi(mesh), step, weights(), (X, Y), reference=reference))


def test_the_function_is_left_as_it_was():
    """JAX keeps the mesh of a call for the next one: not ours."""
    block = mapped(dense)
    without = jax.shard_map(dense, **ROWS)
    for f in (block, without):
        with make_multi(MESH):
            mjit(make_step(f))(weights(), (X, Y))
    jaxpr = jax.make_jaxpr(block)(weights()[0], X)
    assert jaxpr.eqns[0].params["mesh"] is MESH
    with jax.set_mesh(MESH):
        assert jax.make_jaxpr(without)(weights()[0], X).eqns[0].params["mesh"].size == 8


@pytest.mark.parametrize("given", [MESH, None])
def test_without_private_names_it_runs_on_the_whole_mesh(monkeypatch, given):
    monkeypatch.setattr(lending, "shard_map", None)
    block = shard_map(with_mean, mesh=given, **ROWS)
    step = make_step(lambda w, x: jnp.tanh(block(w, x) @ w))
    reference = make_step(lambda w, x: jnp.tanh(mapped(with_mean)(w, x) @ w))
    compiled = check(make_multi(MESH), step, weights(), (X, Y), reference=reference)
    assert submeshes_of(compiled) == {"all devices", "stage=0", "stage=1"}


def test_plain_jax_outside_of_the_context_is_left_alone():
    inner = jax.jit(mapped(dense))
    multi = make_multi(MESH)
    with multi:
        ours = mjit(make_step(inner))(weights(), (X, Y))
    plain = jax.jit(lambda w, x: inner(w, x))(weights()[0], X)
    with multi:
        again = mjit(make_step(inner))(weights(), (X, Y))
        served = jax.jit(lambda w, x: inner(w, x))(weights()[0], X)
    assert plain.sharding.num_devices == 8
    np.testing.assert_array_equal(ours[1], again[1])
    np.testing.assert_allclose(served, plain, rtol=1e-6)


@pytest.mark.parametrize("axis_names", [{"data"}, {"stage", "data"}, {"data", "model"}])
def test_partially_manual(axis_names):
    def body(w, x):
        y = lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, None))
        return y + lax.psum(y.sum(), "data")

    compiled = check(
        make_multi(MESH), make_step(mapped(body, axis_names=axis_names)), weights(), (X, Y)
    )
    assert on_slices(compiled)


def test_weights_sharded_over_an_axis():
    def body(w, x):  # w: columns over model, x: rows over data
        y = jnp.tanh(x @ w)
        return lax.psum_scatter(lax.all_gather(y, "model", axis=1, tiled=True) @ w.mT @ w, "data")[
            None
        ]

    def row_parallel(w, x):
        return jnp.tanh(lax.psum(x @ w, "model"))

    specs = {"in_specs": (P("model"), P("data", "model")), "out_specs": P("data")}
    check(make_multi(MESH), make_step(mapped(row_parallel, **specs)), weights(), (X, Y))


def test_nested():  # forward only: JAX cannot lower its gradient
    @functools.partial(
        jax.shard_map,
        in_specs=P(None, "model"),
        out_specs=P(None, "model"),
        axis_names={"model"},
    )
    def inner(x):
        return x * lax.psum(x.sum(), "model") / 8

    block = mapped(lambda w, x: inner(jnp.tanh(x @ w)), axis_names={"data"})

    def step(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = block(w, x)
        return params, x

    assert on_slices(check(make_multi(MESH), step, weights(), X))


def test_scan_cond_and_custom_vjp_inside():
    @jax.custom_vjp
    def clipped(x):
        return x * 1.5

    clipped.defvjp(lambda x: (x * 1.5, x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * x,))

    def body(w, x):
        def turn(x, _):
            x = jnp.tanh(x @ w) + 0.1 * lax.pmean(x.mean(), "data")
            return lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, x), x.sum()

        x, sums = lax.scan(jax.checkpoint(turn), x, None, length=3)
        return clipped(x) + sums.sum()

    assert on_slices(check(make_multi(MESH), make_step(mapped(body)), weights(), (X, Y)))


@pytest.mark.parametrize("how", ["remat", "scan", "jit", "vmap"])
@pytest.mark.parametrize("given", [MESH, None])
def test_inside_other_transformations(how, given):
    once = shard_map(with_mean, mesh=given, **ROWS)
    column = shard_map(lambda w, x: jnp.tanh(w.sum() * x.sum() + x), mesh=given, **ROWS)

    def scanned(w, x):
        return lax.scan(lambda x, w: (once(w, x), None), x, jnp.stack([w, w / 2]))[0]

    block = {
        "remat": jax.checkpoint(once),
        "jit": jax.jit(once),
        "vmap": jax.vmap(column, in_axes=(None, 1), out_axes=1),
        "scan": scanned,
    }[how]
    plain = MESH if given is None else None
    compiled = check(make_multi(MESH), make_step(block), weights(), (X, Y), plain=plain, steps=1)
    assert on_slices(compiled)


@pytest.mark.parametrize(("schedule", "given"), [("1f1b", None), ("zb-h1", MESH)])
def test_in_a_microbatch_loop(schedule, given):
    def wrap(grad):
        return microbatch(grad, 0, 4, argnum=1, schedule=schedule, reduce="mean")

    block = shard_map(with_mean, mesh=given, check_vma=False, **ROWS)
    plain = MESH if given is None else None
    step = make_step(lambda w, x: block(w @ w, x), wrap)
    assert on_slices(check(make_multi(MESH), step, weights(), (X, Y), plain=plain))


@pytest.mark.parametrize("rotates", [False, True])
def test_layers_of_a_scan_and_rotating_tasks(rotates):
    multi = MultiMesh(global_mesh=MESH)
    task = Task(name="blk", loop_dependent_mesh_slice=lambda i: {"stage": i % 2})
    if rotates:
        multi.register_task("blk", task=task)
    else:
        multi.register_layers("(blk)", num_layers=2, scanned=True)
    block = shard_map(with_mean, mesh=multi if rotates else None, **ROWS)

    def turn(x, w):
        with jax.named_scope("blk"):
            return block(w, x), None

    def step(params, x):
        def loss(params):
            return jnp.mean(lax.scan(turn, x, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    params = np.stack(weights())
    assert on_slices(check(multi, step, params, X, plain=None if rotates else MESH))


def test_eager_gradient():
    block = mapped(with_mean)

    def loss(w, x):
        with layer(1):
            return (block(w, x) ** 2).mean()

    with make_multi(MESH):
        ours = jax.grad(mjit(loss))(weights()[0], X)
    np.testing.assert_allclose(ours, jax.grad(loss)(weights()[0], X), rtol=1e-4)


# --- axes that the slice cuts --------------------------------------------------------------------


def by_stage(w, x):
    return jnp.tanh(x @ w) * (1 + lax.axis_index("stage"))


def summed_over_stages(w, x):
    return jnp.tanh(lax.psum(by_stage(w, x), ("stage", "data")))[:2]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("body", "options"),
    [
        (by_stage, {"out_specs": P(("stage", "data")), "in_specs": (P(), P(("stage", "data")))}),
        (lambda w, x: lax.psum(by_stage(w, x), "stage"), {}),
        (lambda w, x: dense(w, x) - x.mean(0), ROWS),
    ],
)
def test_what_uses_a_cut_axis_runs_on_the_whole_mesh(body, options, check_vma):
    step = make_step(mapped(body, check_vma=check_vma, **options))
    compiled = check(make_multi(MESH), step, weights(), (X, Y))
    assert ("all devices" in submeshes_of(compiled)) == (options is not ROWS)


def test_whole_mesh_in_a_loop_and_in_scans():
    block = mapped(lambda w, x: lax.psum(by_stage(w, x), "stage"))

    def scanned(w, x):
        return lax.scan(lambda x, _: (block(w, jnp.tanh(x @ w)), None), x, None, length=2)[0]

    def mixed(w, x):
        return jnp.tanh(scanned(w, x) @ w)

    def wrap(grad):
        return microbatch(grad, 0, 4, argnum=1, reduce="mean")

    compiled = check(make_multi(MESH), make_step(jax.jit(mixed), wrap), weights(), (X, Y))
    assert submeshes_of(compiled) == {"all devices", "stage=0", "stage=1"}


def test_between_tasks():
    block = mapped(dense)
    spread = mapped(
        lambda x: x * lax.axis_index("stage"),
        in_specs=P(("stage", "data")),
        out_specs=P(("stage", "data")),
    )
    plainly = mapped(
        lambda x: x + lax.psum(x.sum(), "data"), in_specs=P("data"), out_specs=P("data")
    )

    def loss(params, batch):
        x, y = batch
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(block(w, x) @ w)
            x = plainly(spread(x))
        return jnp.mean((x - y) ** 2)

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    compiled = check(make_multi(MESH), step, weights(), (X, Y))
    assert submeshes_of(compiled) == {"all devices", "stage=0", "stage=1"}


def test_around_the_scopes():
    def model(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w) + lax.psum(x.sum(), "data")
        return x

    def step(params, batch):
        def loss(params):
            return jnp.mean(mapped(model)(params, batch[0]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    compiled = check(make_multi(MESH), step, weights(), (X, Y))
    assert "all devices" in submeshes_of(compiled)


# --- other meshes --------------------------------------------------------------------------------


def test_a_submesh_by_hand_places_the_value():
    multi = make_multi(MESH)
    second = multi.slice(stage=1)
    other = Mesh(np.array(jax.devices()[2:6])[::-1], ("rows",))
    there = mapped(dense, second)
    elsewhere = mapped(
        lambda w, x: lax.psum(x @ w, "rows") + x,
        other,
        in_specs=(P(), P("rows")),
        out_specs=P("rows"),
    )

    def block(w, x):
        return elsewhere(w / 4, there(w, x))

    def reference(w, x):
        return (x := dense(w, x)) + jnp.tile((x.reshape(4, 2, 4) @ (w / 4)).sum(0), (4, 1))

    compiled = check(multi, make_step(block), weights(), (X, Y), reference=make_step(reference))
    assert {"devices 4-7", "devices 5,4,3,2"} <= submeshes_of(compiled)


def test_task_meshes_without_a_multi_mesh():
    context = Context()
    for index, devices in enumerate(([0, 1], [2, 3, 4, 5])):
        mesh = TaskMesh(devices=devices, axis_sizes=(len(devices),), axis_names=("data",))
        context.register_task(rf"layer{index}", task=Task(name=f"layer{index}", mesh=mesh))
    block = shard_map(lambda w, x: dense(w, x) + lax.pmean(x.mean(), "data"), **ROWS)
    plain = Mesh(np.array(jax.devices()[:4]), ("data",))
    compiled = check(context, make_step(block), weights(), (X, Y), plain=plain)
    assert submeshes_of(compiled) == {"devices 0-1", "devices 2-5"}


def test_slices_of_unlike_sizes():
    mesh = make_mesh((4, 2, 1))

    def place(index):
        return {"mesh_slice": {"stage": [0, 1] if index else 2}}

    block = mapped(with_mean, mesh)
    compiled = check(make_multi(mesh, place), make_step(block), weights(), (X, Y))
    assert submeshes_of(compiled) == {"stage=2", "stage=[0, 1]"}


@pytest.mark.parametrize("share", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("given", [True, False])
def test_one_trace_for_unlike_submeshes(share, given):
    """JAX would give the trace of the first scope to the second."""
    mesh = make_mesh((2, 2, 1))

    def place(index):
        return {"mesh_slice": {"stage": 0} | ({"data": 1} if index else {})}

    def body(w, x):
        return jnp.tanh(x @ w) + lax.pmean(x.mean(), "data")

    def reference(w, x):
        return jnp.tanh(x @ w) + x.mean()

    block = share(shard_map(body, mesh=mesh if given else None, **ROWS))
    compiled = check(
        make_multi(mesh, place), make_step(block), weights(), (X, Y), reference=make_step(reference)
    )
    used = {"stage=0", "all devices" if given else "stage=0,data=1"}
    assert used <= submeshes_of(compiled)


def test_program_with_nothing_but_a_shard_map():
    def step(w, x):
        return mapped(dense)(w, x), x.sum()

    with MultiMesh(global_mesh=MESH):
        ours, _ = mjit(step)(weights()[0], X)
    np.testing.assert_allclose(ours, dense(weights()[0], X), rtol=1e-5)


def test_outside_of_our_programs_it_is_jaxs_own():
    w = weights()[0]
    with MultiMesh(global_mesh=MESH):
        block = shard_map(dense, **ROWS)
        assert block(w, X).sharding.mesh == MESH
        assert jax.jit(block)(w, X).sharding.num_devices == 8
    with jax.set_mesh(MESH):
        assert shard_map(dense, **ROWS)(w, X).sharding.num_devices == 8
    with pytest.raises(ValueError, match="context mesh"):
        shard_map(dense, **ROWS)(w, X)


# --- mistakes ------------------------------------------------------------------------------------


def fails(error, match, block, multi=None, **places):
    with multi or make_multi(MESH, **places), pytest.raises(error, match=match) as raised:
        mjit(make_step(block))(weights(), (X, Y))
    return str(raised.value)


def test_unknown_axes():
    text = fails(ShardingError, "does not fit `stage=0`", mapped(dense, in_specs=(P(), P("rows"))))
    assert "'stage': 1, 'data': 2, 'model': 2" in text and "rows" in text
    fails(ShardingError, "does not fit `stage=0`", mapped(dense, axis_names={"rows"}))


def test_a_slice_without_the_axis():
    def place(index):
        return {"mesh": TaskMesh(devices=[index, 4 + index], axis_names=("other",))}

    fails(ShardingError, "does not fit `devices 0,4`", shard_map(dense, **ROWS), place=place)


def test_specs_that_do_not_divide():
    block = shard_map(dense, in_specs=(P(), P(("data", "model"))), out_specs=P(("data", "model")))
    with make_multi(MESH), pytest.raises(ShardingError, match="not evenly divisible"):
        mjit(make_step(block))(weights(), (X[:6], Y[:6]))


def test_specs_of_another_rank():
    fails(ShardingError, "does not fit", mapped(dense, in_specs=(P(), P(None, None, "data"))))


def test_layouts_cannot_be_inferred():
    mesh = make_mesh(explicit=True)
    block = jax.shard_map(dense, mesh=mesh, out_specs=P("data"))
    fails(ShardingError, "in_specs", block, multi=make_multi(mesh))


def test_no_mesh_at_all():
    context = Context()
    context.register_task("other", task=Task(mesh=TaskMesh(devices=[0])))
    fails(ShardingError, "stands in no task", shard_map(dense, **ROWS), multi=context)


def test_an_abstract_mesh_of_other_sizes():
    mesh = AbstractMesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    text = fails(ShardingError, "has no devices", mapped(dense, mesh))
    assert "`stage`=4" in text and "the submesh `stage`=1" in text


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_on_unlike_meshes(sign):
    """One branch runs on all devices, the other on the slice of its scope."""
    whole = mapped(lambda w, x: lax.psum(by_stage(w, x), "stage"))

    def step_with(other):
        def block(w, x):
            return lax.cond(sign * jnp.square(x).sum() > 0, whole, other, w, x)

        return make_step(block)

    reference = step_with(mapped(dense))
    step = step_with(shard_map(dense, **ROWS))
    check(make_multi(MESH), step, weights(), (X, Y), reference=reference)
