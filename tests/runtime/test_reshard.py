"""Copies between any two layouts, checked shard by shard."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.jax_compat.copies import base_array, shards
from multimesh._src.runtime import counters
from multimesh._src.runtime.reshard import CopyItem, PreparedCopy, prepare_copy

DEVICE_LISTS = {
    1: ([0], [3]),
    2: ([0, 1], [1, 0], [1, 2], [6, 7]),
    3: ([0, 1, 2], [2, 5, 7]),
    4: ([0, 1, 2, 3], [4, 5, 6, 7], [6, 4, 2, 0], [1, 3, 0, 2]),
    6: ([0, 1, 2, 3, 4, 5], [7, 5, 3, 1, 2, 0]),
    8: ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]),
}
GRIDS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 6: (2, 3), 8: (4, 2)}


def sharding(devices: Sequence[int], *spec: object, **options: object) -> NamedSharding:
    grid = np.array([jax.devices()[i] for i in devices]).reshape(GRIDS[len(devices)])
    return NamedSharding(Mesh(grid, ("a", "b"), **options), P(*spec))


def values(shape: Sequence[int], dtype: object = np.float32) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 251).astype(dtype)


def place(array: np.ndarray, source: NamedSharding) -> jax.Array:
    return jax.device_put(array, source)


def check_result(result: jax.Array, expected: np.ndarray, target: NamedSharding) -> None:
    """Every shard is where the sharding wants it and holds what it should."""
    assert result.sharding == target
    assert result.committed
    assert result.shape == expected.shape and result.dtype == expected.dtype
    index_map = target.devices_indices_map(expected.shape)
    assert len(result.addressable_shards) == len(index_map)
    for (device, index), part in zip(index_map.items(), shards(result), strict=True):
        assert part.devices() == {device}
        np.testing.assert_array_equal(np.asarray(part), expected[index])


def check_copy(
    array: np.ndarray, source: NamedSharding, target: NamedSharding
) -> tuple[PreparedCopy, jax.Array, jax.Array]:
    x = place(array, source)
    prepared = prepare_copy([CopyItem(jax.typeof(x), source, target)])
    (result,) = prepared([x])
    assert x._npy_value is None, "the source went through the host"
    assert result is x or result._npy_value is None
    check_result(result, array, target)
    mine = {part.unsafe_buffer_pointer() for part in shards(x)}
    shared = any(part.unsafe_buffer_pointer() in mine for part in shards(result))
    assert array.size == 0 or shared == prepared.aliases[0]
    return prepared, x, result


def layouts(count: int) -> list[NamedSharding]:
    specs = [(), ("a",), (None, "a"), ("b", "a"), (("a", "b"),), (None, ("b", "a"))]
    return [sharding(devices, *spec) for devices in DEVICE_LISTS[count][:2] for spec in specs]


@pytest.mark.parametrize(("have", "want"), list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_pairs_of_device_counts(have: int, want: int) -> None:
    sources, targets = layouts(have), layouts(want)
    pairs = list(itertools.product(sources, targets))
    for source, target in pairs[:: max(1, len(pairs) // 24)]:
        check_copy(values((8, 16)), source, target)


@pytest.mark.parametrize(("have", "want"), [(2, 3), (3, 2), (4, 6), (6, 4), (3, 8), (6, 1)])
def test_counts_that_do_not_divide_each_other(have: int, want: int) -> None:
    for source_spec, target_spec in itertools.product(
        [(("a", "b"),), (None, ("a", "b")), ("a", "b"), ()], repeat=2
    ):
        source = sharding(DEVICE_LISTS[have][0], *source_spec)
        target = sharding(DEVICE_LISTS[want][-1], *target_spec)
        check_copy(values((24, 24)), source, target)


@st.composite
def random_layouts(draw: st.DrawFn) -> NamedSharding:
    count = draw(st.sampled_from(sorted(DEVICE_LISTS)))
    devices = draw(st.sampled_from(DEVICE_LISTS[count]))
    dims: list[list[str]] = [[], [], []]
    for axis in draw(st.permutations(["a", "b"])):
        dim = draw(st.integers(0, 3))
        if dim < 3:
            dims[dim].append(axis)
    return sharding(devices, *(tuple(axes) or None for axes in dims))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_layouts(), random_layouts())
def test_random_pairs(source: NamedSharding, target: NamedSharding) -> None:
    check_copy(values((24, 48, 24), np.int16), source, target)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint32, jnp.bfloat16, np.complex64])
def test_dtypes(dtype: object) -> None:
    array = values((4, 4), dtype)
    check_copy(array, sharding([0, 1], "a"), sharding([2, 3], "a"))
    check_copy(array, sharding([0, 1], "a"), sharding([0, 1, 2, 3], "a", "b"))
    check_copy(array, sharding([0, 1], "a"), sharding([4], None))


@pytest.mark.parametrize("have", [[0], [0, 1], [4, 5, 6, 7]])
@pytest.mark.parametrize("want", [[0], [2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_scalars(have: list[int], want: list[int]) -> None:
    check_copy(values(()), sharding(have), sharding(want))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (0, 0)])
def test_empty_dims(shape: tuple[int, ...]) -> None:
    last = "a" if len(shape) > 1 else None
    for source, target in itertools.permutations(
        [
            sharding([0, 1], "a"),
            sharding([4, 5, 6, 7], None, last) if last else sharding([4, 5, 6, 7]),
            sharding([0, 1], None, last) if last else sharding([0, 1]),
            sharding([2], None),
        ],
        2,
    ):
        check_copy(values(shape), source, target)


@pytest.mark.parametrize("shape", [(), (4,), (4, 2)])
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_typed_keys(shape: tuple[int, ...], kind: str) -> None:
    first = "a" if shape else None
    layouts_of_keys = [
        sharding([0, 1], *([first] if shape else [])),
        sharding([4, 5], *([first] if shape else [])),
        sharding([0, 1, 2, 3]),
        sharding([7]),
    ]
    keys = jax.random.split(jax.random.key(7, impl=kind), shape)
    expected = np.asarray(jax.random.key_data(keys))
    for source, target in itertools.product(layouts_of_keys, repeat=2):
        x = jax.device_put(keys, source)
        base = base_array(x)
        (result,) = prepare_copy([CopyItem(jax.typeof(x), source, target)])([x])
        assert base._npy_value is None
        assert result.dtype == keys.dtype and result.shape == shape
        assert result.sharding.is_equivalent_to(target, len(shape))
        np.testing.assert_array_equal(np.asarray(jax.random.key_data(result)), expected)


def test_equal_specs_of_another_device_order_do_not_go_by_position() -> None:
    source, target = sharding([0, 1, 2, 3], "a", "b"), sharding([4, 5, 6, 7], "b", "a")
    check_copy(values((4, 4)), source, target)
    check_copy(values((4, 4)), sharding([0, 1], "a"), sharding([1, 0], "a"))


def test_same_sharding_is_the_same_array() -> None:
    source = sharding([0, 1], "a")
    prepared, x, result = check_copy(values((4, 4)), source, source)
    assert result is x
    assert prepared.aliases == (True,) and prepared.num_moves == 0


def test_same_layout_on_another_mesh_is_a_view() -> None:
    explicit = sharding([0, 1], "a", None, axis_types=(AxisType.Explicit,) * 2)
    for source, target in itertools.permutations([sharding([0, 1], "a"), explicit]):
        prepared, _, result = check_copy(values((4, 4)), source, target)
        assert prepared.aliases == (True,) and prepared.num_moves == 0
        assert jax.typeof(result).shape == (4, 4)


def test_replicated_to_submesh_is_a_view() -> None:
    source = sharding(range(8))
    prepared, _, _ = check_copy(values((4, 4)), source, sharding([2, 3]))
    assert prepared.aliases == (True,)
    assert prepared.num_moves == prepared.num_calls == 0


def test_submesh_to_replicated_reuses_its_shards() -> None:
    prepared, x, result = check_copy(values((4, 4)), sharding([2, 3]), sharding(range(8)))
    assert prepared.aliases == (True,) and prepared.num_moves == 1
    reused = [
        a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()
        for a, b in zip(shards(x), shards(result)[2:4], strict=True)
    ]
    assert reused == [True, True]


def test_copies_elsewhere_do_not_alias() -> None:
    prepared, _, _ = check_copy(values((4, 4)), sharding([0, 1], "a"), sharding([2, 3], "a"))
    assert prepared.aliases == (False,) and prepared.num_moves == 1
    prepared, _, _ = check_copy(values((4, 4)), sharding([0, 1], "a"), sharding([0, 2], "a"))
    assert prepared.aliases == (True,) and prepared.num_moves == 1


def test_explicit_meshes_and_layout_changes() -> None:
    explicit = {"axis_types": (AxisType.Explicit,) * 2}
    pairs = [
        (sharding([0, 1], "a", **explicit), sharding([2, 3], None, "a", **explicit)),
        (sharding([0, 1], "a", **explicit), sharding([0, 1], None, "a")),
        (sharding([0, 1], "a"), sharding([0, 1, 2, 3], "a", "b", **explicit)),
        (sharding([0, 1], "a", **explicit), sharding(range(8), **explicit)),
        (sharding(range(8), **explicit), sharding([0, 1], "a", **explicit)),
        (sharding([0, 1, 2, 3], "a", "b", **explicit), sharding([6], **explicit)),
    ]
    for source, target in pairs:
        check_copy(values((4, 4)), source, target)
    with jax.sharding.set_mesh(pairs[0][0].mesh):
        check_copy(values((4, 12)), *pairs[0])
        check_copy(values((4, 12)), *pairs[2])


def test_one_edge_of_many_values_is_one_call() -> None:
    items = [
        (sharding([0, 1], "a"), sharding([2, 3], "a")),
        (sharding([0, 1], "a"), sharding([2, 3], None, "a")),
        (sharding([0, 1], "a"), sharding([0, 1], "a")),
        (sharding([0, 1], "a"), sharding([4, 5, 6, 7], "a", "b")),
        (sharding(range(8)), sharding([4])),
        (sharding([0, 1], "a"), sharding([4])),
    ]
    arrays = [values((4, 4)) + i for i in range(len(items))]
    xs = [place(array, source) for array, (source, _) in zip(arrays, items, strict=True)]
    prepared = prepare_copy(
        [CopyItem(jax.typeof(x), *item) for x, item in zip(xs, items, strict=True)]
    )
    before = counters.snapshot()
    results = prepared(xs)
    added = counters.since(before)
    assert (added.copies, added.moves, added.compiles) == (1, 4, 0)
    for result, array, (_, target) in zip(results, arrays, items, strict=True):
        check_result(result, array, target)
    assert prepared.aliases == (False, False, True, False, True, False)
    assert prepared.num_moves == 4


def test_weak_types_stay_weak() -> None:
    source = sharding([0, 1])
    x = jax.jit(lambda: 2.0, out_shardings=source)()
    assert jax.typeof(x).weak_type
    for target in (sharding([2, 3]), sharding(range(8)), sharding([5])):
        (result,) = prepare_copy([CopyItem(jax.typeof(x), source, target)])([x])
        assert jax.typeof(result).weak_type


def test_results_may_be_used_after_the_source_is_gone() -> None:
    source, target = sharding([0, 1], "a"), sharding([1, 0], None, "a")
    x = place(values((4, 4)), source)
    (result,) = prepare_copy([CopyItem(jax.typeof(x), source, target)])([x])
    x.delete()
    check_result(result + 0, values((4, 4)), target)


def test_sources_on_one_device_shardings() -> None:
    source = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for target in (sharding([0]), sharding([4]), sharding([0, 1], "a"), sharding(range(8))):
        check_copy(values((4, 4)), source, target)


def test_other_memories() -> None:
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    for kind in kinds:
        host = sharding([0, 1], "a").with_memory_kind(kind)
        for other in (
            sharding([0, 1], "a"),
            sharding([2, 3], "a"),
            sharding([2, 3], None, "a"),
            sharding([4, 5, 6, 7], "a", "b"),
        ):
            check_copy(values((4, 4)), host, other)
            check_copy(values((4, 4)), other, host)
