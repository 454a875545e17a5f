"""What the process holds while a schedule runs with 32 MB arrays: what the plan keeps, no more."""

import ctypes
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.runtime.buffers import BufferedPlan, writes
from multimesh.jax import microbatch, mjit
from tests.core.chain import BUILT_IN, cut_for, make_multi_mesh

MEGABYTE = 1 << 20
ARRAY = 32 * MEGABYTE
SHAPE = (1, ARRAY // 4)
NUM_RANKS, NUM_MICROBATCHES = 2, 6
CLEAR_REFS = Path("/proc/self/clear_refs")


def loss(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x + w)
    return jnp.mean(x)


def train_step(schedule):
    def step(params, x):
        """One number for each parameter: all that is large are activations."""

        def of_microbatch(params, x):
            return loss(params, jnp.broadcast_to(x, SHAPE))

        gradient = microbatch(jax.value_and_grad(of_microbatch), 0, 1, argnum=1, schedule=schedule)
        return gradient(params, x)

    return step


def kept_by_plan(buffered: BufferedPlan) -> int:
    """The most bytes of the call's own arrays on each device, summed over devices."""
    plan = buffered.plan
    alive: Counter = Counter()
    most: Counter = Counter()
    for step, frees in zip(plan.steps, buffered.frees, strict=True):
        for sign, slots in ((1, writes(step)), (-1, frees)):
            for slot in slots:
                info = plan.slots[slot]
                size = info.aval.size * info.aval.dtype.itemsize
                alive[info.sharding] += sign * size
            most |= alive
    return sum(most.values())


def reset_peak() -> None:
    CLEAR_REFS.write_text("5")


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("schedule", BUILT_IN)
def test_the_process_holds_what_the_plan_keeps(schedule):
    cut = cut_for(schedule, NUM_RANKS, NUM_MICROBATCHES)
    params = [np.float32(0.1 * i) for i in range(cut.num_layers)]
    x = np.linspace(0, 1, NUM_MICROBATCHES, dtype=np.float32)[:, None]
    with make_multi_mesh(cut):
        compiled = mjit(train_step(schedule)).lower(params, x).compile()
    expected = kept_by_plan(compiled.backend.compiled.buffered)
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left
    before = memory("VmRSS")
    reset_peak()
    jax.block_until_ready(compiled(params, x))
    grown = memory("VmHWM") - before
    print(f"{schedule}: {grown / MEGABYTE:.0f} MB, the plan keeps {expected / MEGABYTE:.0f} MB")
    assert grown <= 1.3 * expected
    assert grown >= 0.5 * expected, "the test does not see what it should"
