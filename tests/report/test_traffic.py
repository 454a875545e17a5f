"""Bytes that cross, and operations, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.partition.assign.cloned import cost_of
from multimesh._src.report.traffic import missing_bytes

BYTES = 8 * 4 * 4  # of a float32[8,4]


def sharding(devices, *spec):
    return NamedSharding(Mesh(np.array(jax.devices())[devices], ("x",)), P(*spec))


@pytest.mark.parametrize(
    ("source", "target", "crossing"),
    [
        (sharding([0, 1], "x"), sharding([2, 3], "x"), BYTES),
        (sharding([0, 1], "x"), sharding([2, 3]), 2 * BYTES),
        (sharding([0, 1]), sharding([0, 1], "x"), 0),
        (sharding([0, 1], "x"), sharding([0, 1]), BYTES),
        (sharding([0, 1], "x"), sharding([0, 1], None, "x"), BYTES // 2),
        (sharding([0, 1], "x"), sharding([1, 0], "x"), BYTES),
        (sharding([0]), sharding([0, 1, 2, 3]), 3 * BYTES),
        (sharding([0, 1, 2, 3], "x"), sharding([1]), BYTES - BYTES // 4),
    ],
)
def test_missing_bytes(source, target, crossing):
    aval = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert missing_bytes(aval, source, target) == crossing


def test_missing_bytes_of_a_key():
    aval = jax.typeof(jax.random.split(jax.random.key(0), 4))
    assert missing_bytes(aval, sharding([0]), sharding([1])) == 4 * 8


@pytest.mark.parametrize(
    ("function", "shapes", "operations"),
    [
        (lambda x, w: x @ w, ((2, 3), (3, 5)), 2 * 2 * 3 * 5),
        (lambda x, y: x + y, ((2, 3), (2, 3)), 6),
        (
            lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"),
            ((1, 3, 8, 8), (6, 3, 3, 3)),
            2 * (6 * 8 * 8) * (3 * 3 * 3),
        ),
        (lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, length=7)[0],
         ((2, 3), (3, 3)), 7 * 2 * 2 * 3 * 3),
    ],
    ids=["matmul", "add", "convolution", "scan"],
)  # fmt: skip
def test_operations(function, shapes, operations):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(function)(*arguments)
    assert sum(map(cost_of, jaxpr.eqns)) == operations
