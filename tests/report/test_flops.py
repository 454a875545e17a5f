"""Operations counted from jaxprs, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from multimesh._src.report.flops import flops_of


def count(function, *shapes, dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return flops_of(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize(
    ("function", "shapes", "operations"),
    [
        (lambda x, w: x @ w, ((2, 3), (3, 5)), 2 * 2 * 3 * 5),
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), ((7, 2, 3), (7, 3, 5)), 7 * 2 * 2 * 3 * 5),
        (lambda x, y: x + y, ((2, 3), (2, 3)), 6),
        (lambda x: lax.tanh(x) * 2, ((4,),), 8),
        (lambda x: jnp.sum(x, axis=0), ((4, 3),), 12),
        (lambda x: lax.cumsum(x), ((5,),), 5),
        (lambda x: x.T[1:].reshape(-1).astype(jnp.bfloat16), ((4, 3),), 0),
        (lambda x: (x > 0) & (x < 1), ((4,),), 0),
        (
            lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
            ((1, 3, 8, 8), (6, 3, 3, 3)),
            2 * (6 * 8 * 8) * (3 * 3 * 3),
        ),
        (
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
            ((4, 4),),
            4 * 4,
        ),
        (
            lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, length=7)[0],
            ((2, 3), (3, 3)),
            7 * 2 * 2 * 3 * 3,
        ),
        (
            lambda x: lax.cond(x[0] > 0, lambda: x + 1, lambda: x * 2 + 1),
            ((4,),),
            8,
        ),
        (jax.checkpoint(lambda x: x * 2), ((4,),), 4),
        (jax.jit(lambda x: x * 2), ((4,),), 4),
        (lambda x: x.at[jnp.array([1, 2])].add(x[:2], mode="clip"), ((4,),), 2),
    ],
    ids=["matmul", "einsum", "add", "tanh", "sum", "cumsum", "moves", "compare", "convolution",
         "window", "scan", "cond", "remat", "jit", "scatter-add"],
)  # fmt: skip
def test_operations(function, shapes, operations):
    assert count(function, *shapes) == operations


def test_a_while_counts_one_turn():
    def function(x):
        return lax.while_loop(lambda c: c[1] < 10, lambda c: (c[0] * 2, c[1] + 1), (x, 0))

    assert count(function, (8,)) == 8


def test_integers_are_no_floats():
    assert count(lambda x: x * 2 + 1, (8,), dtype=jnp.int32) == 0


def test_ragged_products():
    sizes = jnp.array([1, 3], jnp.int32)
    operations = count(lambda x, w: lax.ragged_dot(x, w, sizes), (4, 3), (2, 3, 5))
    assert operations == 2 * 4 * 3 * 5


def test_a_kernel_counts_its_grid():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def function(x):
        block = pl.BlockSpec((2, 4), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = pl.pallas_call(
            kernel, out_shape=shape, grid=(3,), in_specs=[block], out_specs=block, interpret=True
        )
        return call(x)

    assert count(function, (6, 4)) == 24


def test_a_shard_map_counts_every_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert count(function, (8, 2)) == 16
