"""A loop and its transpose become one loop, where the one needs no more of the other (R11)."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from multimesh._src.ir.flat import FlatProgram, all_equations
from multimesh._src.partition.prune import prune
from multimesh._src.partition.transposed import merge_transposes
from multimesh.jax import microbatch
from tests.core import chain
from tests.partition.programs import loops, simplified

CUT = chain.Cut(2, num_microbatches=4)
ARGS = (chain.make_params(2), chain.make_batch(4))


def mean_loss(params: Any, batch: Any) -> Any:
    return microbatch(chain.loss, 0, chain.SIZE, argnum=1, reduce="mean")(params, batch)


def plain(params: Any, batch: Any) -> Any:
    return jax.value_and_grad(mean_loss)(params, batch)


def of_the_loss(params: Any, batch: Any) -> Any:
    """The gradient needs the loss of all microbatches."""
    return jax.value_and_grad(lambda p: jnp.log(mean_loss(p, batch)))(params)


def with_index(params: Any, batch: Any) -> Any:
    """The backward reads the number of the microbatch."""

    def loss(params: Any, batch: Any, index: Any) -> Any:
        return chain.loss(params, batch) * jnp.sin(index * jnp.sum(params[1]))

    cut = microbatch(loss, 0, chain.SIZE, argnum=1, with_index=True)
    return jax.value_and_grad(cut)(params, batch)


def stacked(params: Any, batch: Any) -> Any:
    """What every microbatch makes is also a result."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = chain.layer(0, params[0], batch[0])
        made = chain.layer(1, params[1], hidden)
        return jnp.mean((made - batch[1]) ** 2), hidden

    def total(params: Any) -> Any:
        cut = microbatch(loss, 0, chain.SIZE, argnum=1, reduce=("sum", "stack"))
        return cut(params, batch)

    (value, hidden), grads = jax.value_and_grad(total, has_aux=True)(params)
    return value, hidden, grads


def gradient_of_the_batch(params: Any, batch: Any) -> Any:
    """The second loop writes slots, too."""
    return jax.grad(mean_loss, argnums=(0, 1))(params, batch)


def recurrent(params: Any, batch: Any) -> Any:
    """Every iteration goes on from the one before."""

    def loss(params: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return chain.layer(1, params[1], chain.layer(0, params[0], x)), None

        return jnp.mean(lax.scan(body, batch[0], None, length=4)[0])

    return jax.grad(loss)(params)


MERGED = (plain, with_index, stacked, gradient_of_the_batch)
APART = (of_the_loss, recurrent)


@pytest.mark.parametrize("step", [*MERGED, *APART], ids=lambda step: step.__name__)
def test_loops_are_merged_where_they_can_be(step: Any) -> None:
    flat = simplified(chain.make_multi_mesh(CUT), step, *ARGS)
    assert len(loops(flat.steps)) == 2
    merged = prune(merge_transposes(flat))
    assert len(loops(merged.steps)) == (1 if step in MERGED else 2)
    assert prune(merge_transposes(merged)) == merged


@pytest.mark.parametrize("step", [*MERGED, *APART], ids=lambda step: step.__name__)
def test_merged_loops_give_what_jit_gives(step: Any) -> None:
    ours = chain.run(chain.make_multi_mesh(CUT), step, *ARGS)
    chain.against_jit(ours, step.__name__, step, *ARGS)


def test_stacks_that_only_the_transpose_reads_are_not_built() -> None:
    flat = simplified(chain.make_multi_mesh(CUT), plain, *ARGS)
    assert writes(flat)
    assert not writes(prune(merge_transposes(flat)))


def writes(flat: FlatProgram) -> list[Any]:
    return [eq for eq in all_equations(flat.steps) if eq.primitive == "dynamic_update_slice"]
