"""Public fallbacks give the same arrays as the private ways."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.jax_compat import copies


def sharding(start: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[start : start + 2]), ("a",)), P("a"))


@pytest.fixture
def array() -> jax.Array:
    return jax.device_put(np.arange(8.0).reshape(4, 2), sharding(0))


def test_batched_copies_agree(array: jax.Array) -> None:
    targets = [sharding(2), sharding(4)]
    for make in (copies.batched_copy, copies.public_batched_copy):
        results = make(targets)([array, array])
        assert [result.sharding for result in results] == targets
        for result in results:
            np.testing.assert_array_equal(np.asarray(result), np.asarray(array))


def test_shards_agree(array: jax.Array) -> None:
    private, public = copies.shards(array), copies.public_shards(array)
    for mine, other in zip(private, public, strict=True):
        assert mine.unsafe_buffer_pointer() == other.unsafe_buffer_pointer()


def test_assemblers_agree(array: jax.Array) -> None:
    makers = (
        copies.assembler((4, 2), array.dtype, False, array.sharding),
        copies.public_assembler((4, 2), array.sharding),
    )
    for assemble in makers:
        result = assemble(copies.shards(array))
        assert result.sharding == array.sharding and result.committed
        assert jax.typeof(result) == jax.typeof(array)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(array))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_wrappers_agree(kind: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=kind), 4)
    data = copies.base_array(keys)
    np.testing.assert_array_equal(np.asarray(data), np.asarray(jax.random.key_data(keys)))
    for make in (copies.wrap_keys, copies.public_wrap_keys):
        result = make(keys.dtype)(data)
        assert result.dtype == keys.dtype
        assert bool((result == keys).all())
