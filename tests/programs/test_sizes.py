"""Values of every shape and dtype, trees of every kind, programs of every length."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.runtime import counters
from multimesh.jax import microbatch, mjit
from tests.oracle import bitwise_equal
from tests.programs.measured import check
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

INTEGERS = ["bool", "int2", "int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32"]
FLOATS = ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "bfloat16"]
WIDE = ["float16", "float32", "complex64"]


def sum_loss(params, x):
    return jnp.sum(mlp(params, x) ** 2)


def train(loss=square_loss, size=0, **options):
    """A train step, over microbatches of `size` rows if that is given."""

    def step(params, batch):
        grad = jax.value_and_grad(loss)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, **options)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2])
def test_scalars(width):
    def loss(params, x):
        with layer(0):
            h = jnp.tanh(params[0] * x)
        with layer(1):
            return (h * params[1] - 1.0) ** 2

    check(pipeline(2, width), train(loss), [np.float32(0.3), np.float32(0.7)], np.float32(0.5))


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("inner", [(4, 4, 4), (4, 0, 4), (0, 4, 4), (1, 1, 1)])
def test_dims_of_zero_and_one(rows, inner):
    params = [normal(inner[0], inner[1]), normal(inner[1], inner[2], seed=1)]
    check(pipeline(2, 2), train(sum_loss), params, normal(rows, inner[0]), steps=2)


@pytest.mark.parametrize(("rows", "size"), [(3, 1), (4, 4)])
def test_microbatches_of_one_row_and_only_one(rows, size):
    batch = normal(rows, 4, seed=5), normal(rows, 4, seed=6)
    check(pipeline(2, 2), train(size=size), weights(2), batch)


def test_microbatches_without_elements():
    check(pipeline(2, 2), train(sum_loss, 2), [normal(0, 4), normal(4, 4)], normal(4, 0))


def test_six_dims():
    def loss(params, x):
        with layer(0):
            h = jnp.einsum("abcdef,fg->abcdeg", x, params[0])
        with layer(1):
            h = jnp.tanh(h).transpose(5, 0, 1, 2, 3, 4) @ params[1]
        return jnp.sum(h**2)

    check(pipeline(2, 2), train(loss), [normal(2, 3), normal(2, 2)], normal(1, 2, 3, 1, 2, 2))


def test_new_shapes_and_dtypes_at_later_calls():
    with pipeline(2):
        staged = mjit(train(size=2, reduce="mean"), donate_argnums=0)
    plain = jax.jit(train(size=2, reduce="mean"))
    before = counters.snapshot()
    ours = expected = weights(2)
    for rows in (8, 4, 8, 4):
        batch = normal(rows, 4, seed=rows), normal(rows, 4, seed=1)
        ours, value = staged(ours, batch)
        expected, other = plain(expected, batch)
        np.testing.assert_allclose(value, other, rtol=1e-5)
    for got, want in zip(ours, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert counters.since(before).traces == 2
    half = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), (weights(2), batch))
    assert staged(*half)[0][1].dtype == jnp.bfloat16


# --- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + WIDE)
def test_values_of_every_dtype_cross(dtype):
    dtype = jnp.dtype(dtype)

    def step(x, choose):
        with layer(0):
            a = jnp.where(choose, x, x[::-1]).reshape(2, 2, 4)
        with layer(1):
            b = jnp.concatenate([a, a[::-1]]).transpose(2, 0, 1)
            wide = b.astype(jnp.complex64 if dtype.kind == "c" else jnp.float32) * 2
        return a, b, wide, wide.astype(dtype), b == b[::-1]

    x = (np.arange(16).reshape(4, 4) % 2).astype(dtype)
    choose = np.arange(16).reshape(4, 4) % 3 == 0
    with pipeline(2, 2):
        ours = mjit(step)(x, choose)
    assert jax.tree.all(jax.tree.map(bitwise_equal, ours, jax.jit(step)(x, choose)))


def test_complex_parameters():
    def complex_normal(*shape, seed):
        return (normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 50)).astype("complex64")

    def step(params, x):
        def loss(params, x):
            with layer(0):
                h = jnp.fft.fft(x @ params[0])
            with layer(1):
                return jnp.mean(jnp.abs(h @ params[1]) ** 2)

        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g.conj(), params, grads), value

    params = [complex_normal(4, 4, seed=1) / 4, complex_normal(4, 4, seed=2) / 4]
    with pipeline(2, 2):
        ours = mjit(step)(params, complex_normal(8, 4, seed=3))
    expected = jax.jit(step)(params, complex_normal(8, 4, seed=3))
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_training_through_narrow_floats(dtype):
    """Bit for bit: roundings to eight bits would make an error of one ulp a large one."""

    def narrow(x):
        return x.astype(dtype).astype(jnp.float32)

    def loss(params, x):
        for index, w in enumerate(params):
            with layer(index):
                x = narrow(x) @ narrow(w)
        return jnp.sum(x)

    params, x = jax.tree.map(lambda x: np.round(4 * x) / 4, (weights(2), normal(8, 4)))
    with pipeline(2):
        ours = mjit(train(loss, 4))(params, x)
    assert jax.tree.all(jax.tree.map(bitwise_equal, ours, jax.jit(train(loss, 4))(params, x)))


# --- trees ---------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    first: Any
    second: Any
    name: str = dataclasses.field(metadata={"static": True}, default="")


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value, tag):
        self.value, self.tag = value, tag

    def tree_flatten(self):
        return (self.value,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


class Batch(NamedTuple):
    x: Any
    y: Any
    mask: Any = None


def test_custom_nodes_as_arguments_results_and_batches():
    def loss(model, batch):
        with layer(0):
            h = jnp.tanh(batch.x.value @ model.first.value["w"])
        with layer(1):
            h = h @ model.second[0]
        return jnp.mean((h - batch.y) ** 2), Box({"h": h.sum(1), "none": None}, model.name)

    def step(model, batch):
        reduce = (("mean", Box({"h": "concat", "none": None}, "m")), "sum")
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = microbatch(grad, 0, 4, argnum=1, reduce=reduce)(model, batch)
        return sgd(model, grads), (value, aux, {}, None, ())

    model = Model(Box({"w": normal(4, 4), "unused": None}, "b"), (normal(4, 4, seed=1), ()), "m")
    batch = Batch(Box(normal(8, 4, seed=2), "x"), normal(8, 4, seed=3))

    check(pipeline(2, 2), step, model, batch)


def test_dim_of_each_leaf_of_a_batch_with_none():
    def loss(params, batch):
        x, scale, _ = batch
        return jnp.sum(mlp(params, x) ** 2) * scale

    dim = (1, None, None)

    def step(params, batch):
        def on_slice(params, batch):
            return jax.value_and_grad(loss)(params, (batch[0].T, *batch[1:]))

        value, grads = microbatch(on_slice, dim, 2, argnum=1)(params, batch)
        return sgd(params, grads), value

    check(pipeline(2), step, weights(2), (normal(4, 6), np.float32(0.5), None))


# --- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [None, "concat", "stack"])
def test_forward_only(reduce):
    def step(params, x):
        forward = mlp if reduce is None else microbatch(mlp, 0, 2, argnum=1, reduce=reduce)
        h = forward(params, x)
        return params, (h, h.sum())

    check(pipeline(2, 2), step, weights(3), normal(8, 4), steps=1)


def test_loops_of_unlike_lengths_and_schedules():
    grad = jax.value_and_grad(square_loss)

    def step(params, batch):
        long, short = batch
        one, grads = microbatch(grad, 0, 2, argnum=1, schedule="1f1b")(params, long)
        params = sgd(params, grads)
        two, grads = microbatch(grad, 0, 3, argnum=1, schedule="gpipe", reduce="mean")(
            params, short
        )
        losses = microbatch(square_loss, 0, 4, argnum=1, reduce="stack", schedule="1f1b")(
            params, long
        )
        three, more = microbatch(grad, 0, 1, argnum=1, schedule="zb-h1")(params, short)
        return sgd(sgd(params, grads), more), (one, two, losses, three)

    long = normal(8, 4, seed=1), normal(8, 4, seed=2)
    short = normal(6, 4, seed=3), normal(6, 4, seed=4)
    compiled = check(pipeline(2, 2, halves=True), step, weights(2), (long, short))
    assert [loop.length for loop in compiled.program.loops] == [4, 2, 2, 6]


def make_long(num_equations):
    def step(factors, x):
        for index in range(4):
            with layer(index):
                factor = factors[index]
                for _ in range(num_equations // 8):
                    x = (x ^ factor) + factor
        return factors, x

    return step


# Large enough that no task computes the others' values again.
LONG = np.arange(4, dtype=np.int32), np.arange(1024, dtype=np.int32)


def test_a_thousand_equations():
    check(pipeline(2), make_long(1000), *LONG, steps=1)


def test_ten_thousand_equations_are_cut():
    """Compiling them is XLA's time: see the benchmarks."""
    with pipeline(4):
        lowered = mjit(make_long(10_000)).lower(*LONG)
    assert [task.submesh for task in lowered.program.tasks] == [f"stage={i}" for i in range(4)]
