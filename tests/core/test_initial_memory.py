"""Parameters are made where they live: no device holds more than its own and one array (R8)."""

import math
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from multimesh.jax import parallelize
from tests.core import pipelined

pytestmark = pytest.mark.core

WIDTH = 256
NUM_LAYERS = 8
ARRAY_BYTES = WIDTH * WIDTH * 4


def model(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return x


def init_params():
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    return [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def held(arrays) -> Counter:
    """Bytes on each device. (Looking at shards would make new arrays.)"""
    total: Counter = Counter()
    for array in arrays:
        if not array.is_deleted():
            size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            total.update(dict.fromkeys(array.sharding.device_set, size))
    return total


class Watcher:
    """Notes the most that each device holds while it watches, beyond what it held before."""

    def __enter__(self):
        self.before = held(jax.live_arrays())
        self.most: Counter = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()
        self._look()

    def _watch(self):
        while not self._stopped.is_set():
            self._look()

    def _look(self):
        self.most |= held(jax.live_arrays()) - self.before


@pytest.fixture(scope="module")
def init():
    with pipelined.make_multi_mesh(num_stages=4):
        _, init, _ = parallelize(
            model, init_params=init_params, get_input_batch=lambda: jnp.ones((4, WIDTH))
        )
    return init


def test_devices_hold_their_own_state_while_it_is_made(init):
    init()  # compiles
    with Watcher() as watcher:
        params = jax.block_until_ready(init())
    own = held(params)
    assert set(own) == set(jax.devices())
    assert max(own.values()) == NUM_LAYERS // 4 * ARRAY_BYTES
    for device, most in watcher.most.items():
        assert most <= own[device] + ARRAY_BYTES, device


def test_every_program_makes_what_its_devices_own(init):
    pieces = init.lower().compile().backend.pieces
    assert sorted(i for _, group in pieces for i in group) == list(range(NUM_LAYERS))
    pointers = 64  # of the tuple of results, at most
    for compiled, group in pieces:
        size = compiled.memory_analysis().output_size_in_bytes
        assert size <= len(group) * ARRAY_BYTES + pointers
        assert not any(word in compiled.as_text() for word in ("all-reduce", "all-gather"))


def test_the_bits_are_those_of_the_whole_function(init):
    for ours, plain in zip(init(), jax.jit(init_params)(), strict=True):
        assert jnp.array_equal(jax.device_get(ours), jax.device_get(plain))
