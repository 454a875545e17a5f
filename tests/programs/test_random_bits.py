"""Random bits are those of the un-cut program (R14)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, microbatch, mjit
from tests.programs.plainly import assert_close, check_steps, layer, pipeline, sgd, weights
from tests.programs.stepped import X, Y

BATCH = (X, Y)


def dropout_step(size):
    def loss(params, inputs):
        (x, y), keys = inputs
        kept = []
        for number, w in enumerate(params):
            with layer(number):
                x = jnp.tanh(x @ w)
                mask = jax.random.bernoulli(jax.random.fold_in(keys[0], number), 0.5, x.shape)
                kept.append(mask)
                x = jnp.where(mask, x / 0.5, 0)
        return jnp.mean((x - y) ** 2), kept

    def step(params, batch, key):
        grad = jax.value_and_grad(loss, has_aux=True)
        if not size:
            (value, kept), grads = grad(params, (batch, key[None]))
            return sgd(params, grads), value, kept
        keys = jax.random.split(key, len(batch[0]) // size)
        keys = jnp.repeat(keys, size, axis=0)
        reduce = (("sum", "stack"), "sum")
        grad = microbatch(grad, 0, size, argnum=1, reduce=reduce)
        (value, kept), grads = grad(params, (batch, keys))
        return sgd(params, grads), value, kept

    return step


@pytest.mark.parametrize(
    ("make_key", "size", "shapes"),
    [(jax.random.key, 2, ((2, 2), (3, 1))), (jax.random.PRNGKey, 0, ((1, 2), (2, 1)))],
)
def test_masks_do_not_depend_on_stages(make_key, size, shapes):
    step, key = dropout_step(size), make_key(7)
    expected = jax.jit(step)(weights(3), BATCH, key)
    for stages, width in shapes:
        with pipeline(stages, width):
            ours = mjit(step)(weights(3), BATCH, key)
        assert_close(ours, expected)


def drop(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def split_along(params, x, key):
    """A chain of splits through the layers."""
    for number, w in enumerate(params):
        with layer(number):
            key, own = jax.random.split(key)
            x = drop(jnp.tanh(x @ w), own)
    return x


def folded_in(params, x, key):
    """A key of its own in every layer, by its number."""
    for number, w in enumerate(params):
        with layer(number):
            x = drop(jnp.tanh(x @ w), jax.random.fold_in(key, number))
    return x


def split_ahead(params, x, key):
    """All keys are made before the layers."""
    keys = jax.random.split(key, len(params))
    for number, w in enumerate(params):
        with layer(number):
            x = drop(jnp.tanh(x @ w), keys[number])
    return x


@pytest.mark.parametrize("model", [split_along, folded_in, split_ahead])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("size", [0, 2])
def test_layers_that_draw_random_bits_share_programs(model, make_key, size):
    """Keys are made once per submesh: the number of programs does not grow with the layers."""
    devices = np.array(jax.devices()[:2]).reshape(2, 1)

    def loss(params, batch, key):
        return jnp.mean((model(params, batch[0], key) - batch[1]) ** 2)

    def step(params, batch, key):
        grad = jax.value_and_grad(loss)
        grad = microbatch(grad, 0, size, argnum=1, schedule="1f1b") if size else grad
        value, grads = grad(params, batch, key)
        return sgd(params, grads), value

    counts = []
    for num_layers in (4, 8):
        multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
        multi_mesh.register_layers(r"layer\d+", num_layers=num_layers)
        args = weights(num_layers), BATCH, make_key(7)
        with multi_mesh:
            lowered = mjit(step).lower(*args)
        counts.append(lowered.explain().num_executables)
        assert_close(lowered.compile()(*args), jax.jit(step)(*args))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
@pytest.mark.parametrize("model", [split_along, folded_in, split_ahead])
def test_recomputed_layers_of_several_stages_a_rank_draw_random_bits(model, schedule):
    """The keys of a backward pass are made in the stage that goes first."""
    devices = np.array(jax.devices()[:2]).reshape(2, 1)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")))
    placement = "v" if schedule == "zb-v" else "loop"
    multi_mesh.register_layers(r"layer\d+", num_layers=4, interleave=2, placement=placement)

    def loss(params, batch, key):
        return jnp.mean((jax.checkpoint(model)(params, batch[0], key) - batch[1]) ** 2)

    def step(params, batch, key):
        grad = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1, schedule=schedule)
        value, grads = grad(params, batch, key)
        return sgd(params, grads), value

    check_steps(multi_mesh, step, weights(4), BATCH, jax.random.key(7))
