"""Kernels inside tasks: custom_partitioning, and Pallas in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec as P

import multimesh.jax as mm
from multimesh.jax import Task, microbatch, mjit, with_sharding_constraint
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

MESH = make_mesh()
ROWS = {"in_specs": (P(), P("data")), "out_specs": P("data")}


def differentiable(forward, transposed):
    """`tanh(x @ w)` by a kernel, and its gradients by kernels for `a.T @ b`."""

    @jax.custom_vjp
    def block(w, x):
        return forward(w, x)

    def fwd(w, x):
        y = forward(w, x)
        return y, (w, x, y)

    def bwd(saved, g):
        w, x, y = saved
        g = g * (1 - y * y)
        return transposed(x, g), transposed(g.T, w.T)

    block.defvjp(fwd, bwd)
    return block


# --- custom_partitioning -------------------------------------------------------------------------


def make_partitioned(seen, make=custom_partitioning):
    """A kernel for x[m,k], w[k,n] that keeps rows, and sums over the axes that shard k."""

    @make
    def kernel(w, x):
        return jnp.tanh(x @ w)

    def partition(mesh, arguments, result):
        seen.append(mesh)
        rows, inner = (*arguments[1].sharding.spec, None, None)[:2]
        shardings = NamedSharding(mesh, P(inner, None)), NamedSharding(mesh, P(rows, inner))

        def on_shard(w, x):
            y = x @ w
            return jnp.tanh(y if inner is None else lax.psum(y, inner))

        return mesh, on_shard, NamedSharding(mesh, P(rows, None)), shardings

    def infer(mesh, arguments, result):  # unused where Shardy propagates
        rows = (*arguments[1].sharding.spec, None)[0]
        return NamedSharding(mesh, P(rows, None))

    def rule(mesh, values, results):
        seen.append(mesh)
        return "k n, m k -> m n"

    kernel.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return kernel


@pytest.mark.parametrize("spec", [P("data", None), P("data", "model"), P(None, None)])
@pytest.mark.parametrize("make", [custom_partitioning, mm.custom_partitioning])
def test_callbacks_see_the_submesh(spec, make):
    seen = []
    kernel = make_partitioned(seen, make)
    block = differentiable(kernel, lambda a, b: a.T @ b)

    def constrained(w, x):
        return block(w, with_sharding_constraint(x, spec))

    multi = make_multi(MESH)
    step, reference = make_step(constrained), make_step(block)
    with multi:
        mjit(step).lower(weights(), (X, Y)).compile()
    slices = [multi.slice(stage=0), multi.slice(stage=1)]
    assert all(mesh.shape["stage"] == 1 and mesh.size == 4 for mesh in seen)
    assert {tuple(mesh.devices.flat) for mesh in seen} == {tuple(m.devices.flat) for m in slices}
    assert submeshes_of(check(multi, step, weights(), (X, Y), reference=reference)) == {
        "stage=0",
        "stage=1",
    }


def test_layouts_go_through_the_rule():
    kernel = make_partitioned([])

    def step(w, x):
        with jax.named_scope("layer0"):
            return kernel(w, with_sharding_constraint(x, P("data", None)))

    with make_multi(MESH):
        result = mjit(step)(weights()[0], X)
    assert result.sharding.spec == P("data", None)
    np.testing.assert_allclose(result, np.tanh(X @ weights()[0]), rtol=1e-5)


def test_partitioned_kernel_in_loops_and_shard_map():
    block = differentiable(make_partitioned([]), lambda a, b: a.T @ b)
    manual = jax.shard_map(block, mesh=MESH, check_vma=False, **ROWS)

    def both(w, x):
        return lax.scan(lambda x, _: (manual(w, jax.checkpoint(block)(w, x)), None), x, None, 2)[0]

    def wrap(grad):
        return microbatch(grad, 0, 4, argnum=1, reduce="mean")

    check(make_multi(MESH), make_step(both, wrap), weights(), (X, Y))


# --- Pallas --------------------------------------------------------------------------------------


def _forward(w_ref, x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...] @ w_ref[...])


def _transposed(a_ref, b_ref, y_ref):
    y_ref[...] = a_ref[...].T @ b_ref[...]


def pallas_forward(w, x):
    rows, inner = x.shape
    return pl.pallas_call(
        _forward,
        grid=(2,),
        in_specs=[
            pl.BlockSpec(w.shape, lambda i: (0, 0)),
            pl.BlockSpec((rows // 2, inner), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((rows // 2, w.shape[1]), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype),
        interpret=True,
    )(w, x)


def pallas_transposed(a, b):
    shape = jax.ShapeDtypeStruct((a.shape[1], b.shape[1]), a.dtype)
    return pl.pallas_call(_transposed, out_shape=shape, interpret=True)(a, b)


pallas_block = differentiable(pallas_forward, pallas_transposed)


@pytest.mark.parametrize("how", ["", "remat", "shard_map"])
def test_pallas(how):
    block = {
        "": pallas_block,
        "remat": jax.checkpoint(pallas_block),
        "shard_map": jax.shard_map(pallas_block, mesh=MESH, check_vma=False, **ROWS),
    }[how]
    compiled = check(make_multi(MESH), make_step(block), weights(), (X, Y))
    assert submeshes_of(compiled) == {"stage=0", "stage=1"}


def halves(index):
    return {"mesh_slice": {"stage": index}, "split_backprop": ("_dx", "_dw")}


@pytest.mark.parametrize("manual", [False, True])
def test_backward_kernels_are_split(manual):
    """A kernel counts as a contraction: B has what the weight gradient reads, W the gradient."""
    block = pallas_block
    if manual:
        block = jax.shard_map(block, mesh=MESH, check_vma=False, **ROWS)

    def wrap(grad):
        return microbatch(grad, 0, 4, argnum=1, schedule="zb-h1", reduce="mean")

    step = make_step(lambda w, x: block(w, jnp.tanh(x @ w)), wrap)
    compiled = check(make_multi(MESH, halves), step, weights(), (X, Y))
    (loop,) = compiled.program.loops
    assert loop.whole == ()
    names = {task.name for task in compiled.program.tasks}
    assert {"layer0_bwd_dx", "layer0_bwd_dw"} <= names


@pytest.mark.parametrize("kind", ["pallas", "shard_map", "pallas in shard_map", "partitioned"])
def test_equal_stages_share_bodies(kind):
    mesh = make_mesh((4, 2, 1))
    dense = differentiable(lambda w, x: jnp.tanh(x @ w), lambda a, b: a.T @ b)
    manual = functools.partial(jax.shard_map, mesh=mesh, check_vma=False, **ROWS)
    block = {
        "pallas": pallas_block,
        "shard_map": manual(dense),
        "pallas in shard_map": manual(pallas_block),
        "partitioned": differentiable(make_partitioned([]), lambda a, b: a.T @ b),
    }[kind]
    with make_multi(mesh):
        lowered = mjit(make_step(block)).lower(weights(4), (X, Y))
    plan = lowered._partitioned.plan
    bodies = {e.name: id(e.body) for e in plan.executables}
    assert bodies["layer1"] == bodies["layer2"]
    assert bodies["layer1_bwd"] == bodies["layer2_bwd"]


def test_grids_of_unlike_kernels_are_told_apart():
    def scaled(rows):
        def block(w, x):
            spec = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
            return pl.pallas_call(
                lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...] - x_ref[...].sum()),
                grid=(x.shape[0] // rows,),
                in_specs=[spec],
                out_specs=spec,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                interpret=True,
            )(x @ w)

        return block

    def step(params, x):
        for index, w in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = scaled((2, 4)[index])(w, x)
        return params, x

    check(make_multi(MESH), step, weights(), X, steps=1)


def test_task_of_a_kernel_by_name():
    context = mm.Context()
    context.register_task("fused", task=Task(mesh=mm.TaskMesh(devices=[3])))

    def step(w, x):
        with jax.named_scope("fused"):
            return w, pallas_forward(w, x)

    assert submeshes_of(check(context, step, weights()[0], X, steps=1)) == {"device 3"}
