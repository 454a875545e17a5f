"""Batches that a step reads in several forms: cut in one or two ways, and whole."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from multimesh._src.runtime import counters
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
    """The batch in the model at once, and in a sum."""
    scale = jnp.abs(batch[0]).mean()
    params = sgd(params, gradients(params, batch)[1])
    return params, square_loss(params, batch) / scale


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


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 0.9 * x])
def test_a_batch_that_is_state_does_not_move(change):
    """It has one form: a second one would be cut anew at every call."""
    multi_mesh = pipeline(2, 2)

    def step(batch, params):
        return jax.tree.map(change, batch), gradients(params, batch)

    check_steps(multi_mesh, step, BATCH, weights(2))
    with multi_mesh:
        staged = mjit(step, donate_argnums=0)
    batch, params = jax.device_put(BATCH), jax.device_put(weights(2))
    moves = []
    for _ in range(3):
        before = counters.snapshot()
        batch, _ = staged(batch, params)
        moves.append(counters.since(before).argument_moves)
    assert moves[1] == moves[2] == len(params)  # the parameters, which are given from one device
