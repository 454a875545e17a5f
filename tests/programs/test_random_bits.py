"""Random bits are those of the un-cut program (R14)."""

import jax
import jax.numpy as jnp
import pytest

from multimesh.jax import microbatch, mjit
from tests.programs.plainly import assert_close, layer, pipeline, sgd, weights
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
