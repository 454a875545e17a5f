"""Every schedule on an unmodified program gives what plain `jax.jit` gives (R1)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, Task, context, microbatch, mjit, schedules
from multimesh.jax.schedules import make_schedule
from tests.core import chain
from tests.core.chain import BUILT_IN, LOOPED, ONE_CHUNK, V_SHAPED, Cut, cut_for

pytestmark = pytest.mark.core

CASES = (
    *((name, 1, "loop") for name in (*ONE_CHUNK, None)),
    *((name, 2, "loop") for name in LOOPED),
    *((name, 2, "v") for name in V_SHAPED),
)
QUICK = ("1f1b", "zb-h1", "dualpipe-v")


def check(cut: Cut, step, plain, key, **options):
    """Runs `step` on the stages of `cut` and compares it with plain jit of `plain`."""
    num_layers = options.get("num_layers") or cut.num_layers
    args = (chain.make_params(num_layers), chain.make_batch(cut.num_microbatches))
    ours = chain.run(chain.make_multi_mesh(cut, **options), step, *args)
    chain.against_jit(ours, (key, num_layers, cut.num_microbatches), plain, *args)
    return ours


# --- every name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "chunks", "placement"), CASES)
def test_a_schedule_gives_what_jit_gives(name, chunks, placement, num_ranks):
    cut = Cut(num_ranks, chunks, placement)
    check(cut, chain.train_step(name), chain.train_step(), "plain")


def test_schedules_that_add_in_ascending_order_are_bitwise_equal():
    cut = Cut(2, num_microbatches=4)
    names = ("gpipe", "1f1b", "eager-1f1b")
    results = [check(cut, chain.train_step(name), chain.train_step(), "plain") for name in names]
    assert all(chain.same_bits(results[0], other) for other in results[1:])


# --- programs -------------------------------------------------------------------------------------


def forward_only(schedule):
    def step(params, batch):
        return microbatch(chain.loss, 0, chain.SIZE, argnum=1, schedule=schedule)(params, batch)

    return step


def two_loops(schedule):
    def step(params, batch):
        value, grads = chain.gradient(chain.loss, schedule)(params, batch)
        params = chain.descend(params, grads)
        again, grads = chain.gradient(chain.loss, schedule)(params, batch)
        return chain.descend(params, grads), (value, again)

    return step


def code_around(schedule):
    """Something of the parameters before, between and after two loops."""

    def step(params, batch):
        scaled = jax.tree.map(lambda w: w * (1 + 0.1 * jnp.tanh(jnp.sum(w))), params)
        value, grads = chain.gradient(chain.loss, schedule)(scaled, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        scaled = jax.tree.map(lambda w, g: w - g / (1 + norm), scaled, grads)
        value, grads = chain.gradient(chain.loss, schedule)(scaled, (batch[0], batch[1] * value))
        return chain.descend(params, grads), jnp.log1p(value) + norm

    return step


def nested(schedule):
    def step(params, batch):
        value, grads = jax.jit(chain.gradient(chain.loss, schedule))(params, batch)
        return jax.jit(chain.descend)(params, grads), value

    return step


def gradient_outside(schedule):
    def step(params, batch):
        cut = microbatch(
            chain.loss, 0, chain.SIZE, argnum=1, schedule=schedule, reduce="mean"
        )
        value, grads = jax.value_and_grad(cut)(params, batch)
        return chain.descend(params, grads), value

    return step


PROGRAMS = {
    "tied": functools.partial(chain.train_step, fun=functools.partial(chain.loss, tied=True)),
    "remat": functools.partial(chain.train_step, fun=functools.partial(chain.loss, remat=True)),
    "forward only": forward_only,
    "two loops": two_loops,
    "code around": code_around,
    "nested": nested,
    "gradient outside": gradient_outside,
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT_IN]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_under_every_schedule(program, name):
    make = PROGRAMS[program]
    check(cut_for(name, 2, 4), make(name), make(None), program)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("program", ["tied", "remat"])
def test_a_program_on_four_ranks(program, name):
    make = PROGRAMS[program]
    check(cut_for(name, 4), make(name), make(None), program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "looped-bfs", None])
def test_fewer_microbatches_than_ranks(name):
    cut = cut_for(name, 4, 2)
    check(cut, chain.train_step(name), chain.train_step(), "plain")
