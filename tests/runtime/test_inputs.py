"""Arguments that arrive in place, elsewhere and in other forms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding

from multimesh._src.frontend.batches import MicrobatchedArray, prepare_batch
from multimesh._src.runtime import counters
from multimesh._src.runtime.compiled_plan import CompiledPlan, compile_plan
from tests.runtime.plans import P, PlanBuilder, submesh

_ROWS = np.arange(96, dtype=np.float32).reshape(8, 12)


def _identity(*, devices: tuple[int, ...] = (2, 3), **argument: Any) -> tuple[CompiledPlan, Any]:
    """A step that returns its only argument, doubled; and the sharding of its slot."""
    builder = PlanBuilder()
    place = submesh(0, devices)
    shape = argument.pop("shape", _ROWS.shape)
    slot = builder.argument("x", shape, place, argument.pop("spec", P("data")), **argument)
    spec = builder.slots[slot].sharding.spec
    results = builder.task("double", lambda x: (x * 2,), place, [slot], [spec])
    return compile_plan(builder.plan(*results)), builder.slots[slot].sharding


def _arrive(step: CompiledPlan, value: Any) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the result, and (moves, puts) of the arguments."""
    before = counters.snapshot()
    (result,) = step.call([value])
    grown = counters.since(before)
    return np.asarray(result), (grown.argument_moves, grown.argument_puts)


def _mesh(devices: tuple[int, ...], *names: str, kind: AxisType = AxisType.Auto) -> Mesh:
    array = np.array([jax.devices()[i] for i in devices])
    array = array.reshape((1,) * (len(names) - 1) + (-1,))
    return Mesh(array, names, axis_types=(kind,) * len(names))


def test_in_place_whatever_the_mesh_is_called() -> None:
    step, sharding = _identity()
    explicit = _mesh((2, 3), "stage", "data", kind=AxisType.Explicit)
    for place in (
        sharding,
        NamedSharding(explicit, P("data")),
        NamedSharding(_mesh((2, 3), "rows"), P("rows", None)),
    ):
        for _ in range(2):
            result, grown = _arrive(step, jax.device_put(_ROWS, place))
            np.testing.assert_array_equal(result, 2 * _ROWS)
            assert grown == (0, 0)


@pytest.mark.parametrize(
    ("devices", "spec"),
    [
        ((2, 3), P(None, "rows")),  # other layout
        ((2, 3), P()),
        ((3, 2), P("rows")),  # other device order
        ((4, 5), P("rows")),  # other devices
        ((0, 1, 2, 3), P("rows")),  # more devices
        ((0, 1, 2, 3), P()),
    ],
)
def test_moved_from_devices(devices: tuple[int, ...], spec: Any) -> None:
    step, _ = _identity()
    array = jax.device_put(_ROWS, NamedSharding(_mesh(devices, "rows"), spec))
    for _ in range(2):
        result, grown = _arrive(step, array)
        np.testing.assert_array_equal(result, 2 * _ROWS)
        assert grown == (1, 0)
    assert not array.is_deleted()


def test_single_device_and_uncommitted() -> None:
    step, _ = _identity()
    for array in (jnp.asarray(_ROWS), jax.device_put(_ROWS, jax.devices()[7])):
        result, grown = _arrive(step, array)
        np.testing.assert_array_equal(result, 2 * _ROWS)
        assert grown == (1, 0)


@pytest.mark.parametrize("value", [_ROWS, _ROWS.astype(np.float64), _ROWS.tolist()])
def test_from_the_host(value: Any) -> None:
    step, _ = _identity()
    result, grown = _arrive(step, value)
    np.testing.assert_array_equal(result, 2 * _ROWS)
    assert grown == (0, 1)


@pytest.mark.parametrize("value", [3, 3.0, True, np.float32(3), np.array(3)])
def test_scalars(value: Any) -> None:
    step, _ = _identity(shape=(), spec=P())
    result, grown = _arrive(step, value)
    assert (result == 2 * np.float32(value)).all()
    assert grown == (0, 1)


def test_unusual_memory_layout() -> None:
    step, sharding = _identity()
    plain = jax.device_put(_ROWS, sharding)
    turned = jax.device_put(_ROWS, Format(Layout((1, 0)), sharding))
    for array in (turned, plain, turned):
        result, _ = _arrive(step, array)
        np.testing.assert_array_equal(result, 2 * _ROWS)


def test_host_memory_of_a_donated_argument_is_not_written() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0,))
    slot = builder.argument("x", (1 << 16,), place, donated=True)
    step = compile_plan(builder.plan(*builder.task("add", lambda x: (x + 1,), place, [slot])))
    value = np.zeros(1 << 16, np.float32)
    jax.block_until_ready(step.call([value]))
    assert not value.any()


def test_moved_donated_argument_is_deleted_and_the_result_stays() -> None:
    step, _ = _identity(devices=(0, 1), donated=True, spec=P())
    array = jax.device_put(_ROWS, jax.devices()[0])  # its shard is shared with the slot's array
    (result,) = step.call([array])
    assert array.is_deleted()
    np.testing.assert_array_equal(result, 2 * _ROWS)


def test_moved_donated_argument_that_is_returned() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    slot = builder.argument("x", _ROWS.shape, place, donated=True)
    step = compile_plan(builder.plan(slot))
    (result,) = step.call([jax.device_put(_ROWS, jax.devices()[0])])
    np.testing.assert_array_equal(result, _ROWS)


# --- microbatch-major ----------------------------------------------------------------------------

_CUT = {  # dim -> slot shape for 4 microbatches, expected content
    0: ((4, 2, 12), _ROWS.reshape(4, 2, 12)),
    1: ((4, 8, 3), _ROWS.reshape(8, 4, 3).transpose(1, 0, 2)),
}
_SPEC = {0: P(None, "data"), 1: P(None, None)}


def _cutting(dim: int, devices: tuple[int, ...] = (2, 3)) -> tuple[CompiledPlan, Any]:
    shape, _ = _CUT[dim]
    return _identity(devices=devices, shape=shape, spec=_SPEC[dim], microbatches=4, dim=dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("make", "grown"),
    [
        (lambda: _ROWS, (0, 1)),
        (lambda: jnp.asarray(_ROWS), (1, 0)),
        (lambda: jax.device_put(_ROWS, NamedSharding(_mesh((2, 3), "d"), P("d"))), (1, 0)),
        (lambda: jax.device_put(_ROWS, NamedSharding(_mesh((2, 3), "d"), P(None, "d"))), (1, 0)),
        (lambda: jax.device_put(_ROWS, NamedSharding(_mesh((5, 4), "d"), P("d"))), (1, 0)),
        (lambda: jax.device_put(_ROWS, NamedSharding(_mesh((0, 1, 2, 3), "d"), P("d"))), (1, 0)),
    ],
)
def test_batch_is_stored_microbatch_major(dim: int, make: Any, grown: tuple[int, int]) -> None:
    step, _ = _cutting(dim)
    value = make()
    for number in range(2):
        before = counters.snapshot()
        result, counted = _arrive(step, value)
        np.testing.assert_array_equal(result, 2 * _CUT[dim][1])
        assert counted == grown
        if number:
            assert counters.since(before).compiles == 0


@pytest.mark.parametrize("dim", [0, 1])
def test_prepared_batch_is_taken_as_it_is(dim: int) -> None:
    step, sharding = _cutting(dim)
    batch_spec = P(*sharding.spec[1:])
    size = _ROWS.shape[dim] // 4
    batch = prepare_batch(_ROWS, dim, size, sharding=NamedSharding(sharding.mesh, batch_spec))
    assert isinstance(batch, MicrobatchedArray)
    result, grown = _arrive(step, batch)
    np.testing.assert_array_equal(result, 2 * _CUT[dim][1])
    assert grown == (0, 0)


def test_batch_prepared_otherwise_is_laid_out_anew() -> None:
    step, _ = _cutting(0)
    for batch in (prepare_batch(_ROWS, 0, 4), prepare_batch(_ROWS, 1, 3)):
        result, _ = _arrive(step, batch)
        np.testing.assert_array_equal(result, 2 * _CUT[0][1])
    plain, _ = _identity()
    result, _ = _arrive(plain, prepare_batch(_ROWS, 0, 4))
    np.testing.assert_array_equal(result, 2 * _ROWS)
