"""Batches that a step reads in several forms: cut in one or two ways, and whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from multimesh.jax import microbatch, mjit, prepare_batch
from tests.programs.plainly import (
    assert_close,
    check_steps,
    normal,
    pipeline,
    sgd,
    square_loss,
    weights,
)

pytestmark = pytest.mark.core

BATCH = (normal(8, 4, seed=1), normal(8, 4, seed=2))


def gradients(params, batch, size=2):
    loss = jax.value_and_grad(square_loss)
    return microbatch(loss, 0, size, argnum=1, reduce="mean", schedule="1f1b")(params, batch)


def sharpness_aware(params, batch):
    """Two gradients of one batch."""
    _, first = gradients(params, batch)
    value, second = gradients(jax.tree.map(lambda p, g: p + 0.1 * g, params, first), batch)
    return sgd(params, second), value


def with_evaluation(params, batch):
    """Another loop that cuts the batch otherwise."""
    params = sgd(params, gradients(params, batch)[1])
    return params, microbatch(square_loss, 0, 4, argnum=1, reduce="mean")(params, batch)


def with_whole_reads(params, batch):
    """The batch in the model at once, in a sum, and returned."""
    scale = jnp.abs(batch[0]).mean()
    params = sgd(params, gradients(params, batch)[1])
    return params, (square_loss(params, batch) / scale, batch)


STEPS = (sharpness_aware, with_evaluation, with_whole_reads)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("width", [1, 2])
def test_results_are_those_of_plain_jit(step, width):
    check_steps(pipeline(2, width), step, weights(2), BATCH)


@pytest.mark.parametrize("step", STEPS)
def test_every_form_is_sharded(step):
    """No microbatch gathers the batch, and every stage shards its activations."""
    with pipeline(2, 2):
        lowered = mjit(step, in_shardings=(None, P("data"))).lower(weights(2), BATCH)
    assert "all-gather" not in lowered.compile().as_text()
    report = lowered.explain()
    assert {a.layout for a in report.arguments if a.name.startswith("batch")} == {"P('data')"}
    cut = {a.microbatches for a in report.arguments if a.name == "batch[0]"}
    assert cut == {sharpness_aware: {4}, with_evaluation: {4, 2}, with_whole_reads: {4, 0}}[step]


@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_argument_gives_every_form(step):
    multi_mesh = pipeline(2, 2)
    on_mesh = NamedSharding(multi_mesh.global_mesh, P("data"))
    with multi_mesh:
        staged = mjit(step)
    expected = jax.jit(step)(weights(2), BATCH)
    for batch in (
        BATCH,
        jax.device_put(BATCH),
        jax.device_put(BATCH, jax.devices()[3]),
        jax.device_put(BATCH, on_mesh),
        prepare_batch(BATCH, 0, 2),
        prepare_batch(BATCH, 0, 4),
    ):
        assert_close(staged(weights(2), batch), expected)


def test_a_donated_batch_that_is_returned_stays_the_callers():
    with pipeline(2):
        staged = mjit(with_whole_reads, donate_argnums=1)
    batch = jax.device_put(BATCH)
    expected = jax.jit(with_whole_reads)(weights(2), BATCH)
    for _ in range(2):
        params, (value, batch) = staged(weights(2), batch)
        assert_close((params, (value, batch)), expected)
    np.testing.assert_array_equal(batch[0], BATCH[0])
