"""Compiled plans on eight CPU devices, against plain NumPy."""

import gc
import signal
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from multimesh._src.errors import ExecutionError, NonFiniteError
from multimesh._src.runtime import counters, prepared
from multimesh._src.runtime.compiled_plan import CompiledPlan, compile_plan
from tests.runtime.plans import P, PlanBuilder, accumulation, submesh

_W = np.linspace(0.5, 2.0, 8, dtype=np.float32)
_TOTAL = np.ones(8, np.float32)


def _batch(count: int) -> list[np.ndarray]:
    return [np.full(8, i, np.float32) for i in range(count)]


def _expected(w: Any, total: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
    total = np.asarray(total) + sum(np.sin(x) * np.asarray(w) for x in batch)
    return np.asarray(w) - total, total


def _pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _single(function: Any, *shapes: tuple[int, ...], donated: bool = False) -> CompiledPlan:
    """One task on two devices, arguments `a0`, `a1`, ..."""
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    slots = [
        builder.argument(f"a{i}", shape, place, donated=donated) for i, shape in enumerate(shapes)
    ]
    num_results = len(jax.eval_shape(function, *(jnp.zeros(shape) for shape in shapes)))
    results = builder.task("only", function, place, slots, [P()] * num_results)
    return compile_plan(builder.plan(*results), name="step")


@pytest.mark.parametrize("donated", [True, False])
def test_results(donated: bool) -> None:
    step = compile_plan(accumulation(4, donated=donated))
    for got, want in zip(
        step.call([_W, _TOTAL, *_batch(4)]), _expected(_W, _TOTAL, _batch(4)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_five_steps_compile_once_and_move_no_state() -> None:
    before = counters.snapshot()
    step = compile_plan(accumulation(3))
    compiled = counters.since(before)
    assert compiled.lowerings == compiled.compiles >= 3
    state = step.call([_W, _TOTAL, *_batch(3)])
    before = counters.snapshot()
    for _ in range(4):
        state = step.call([*state, *_batch(3)])
    grown = counters.since(before)
    assert (grown.traces, grown.lowerings, grown.compiles) == (0, 0, 0)
    assert (grown.argument_moves, grown.argument_puts) == (0, 4 * 3)
    assert (grown.moves, grown.copies) == (4 * 3, 4 * 3)


def test_donation_is_in_place() -> None:
    step = compile_plan(accumulation(4))
    w, total = step.call([_W, _TOTAL, *_batch(4)])
    w_pointers, total_pointers = _pointers(w), _pointers(total)
    new_w, new_total = step.call([w, total, *_batch(4)])
    assert _pointers(new_total) == total_pointers
    assert _pointers(new_w) == w_pointers
    assert w.is_deleted() and total.is_deleted()


def test_undonated_argument_stays_valid() -> None:
    step = compile_plan(accumulation(4, donated=False))
    _, total = step.call([_W, _TOTAL, *_batch(4)])
    before = np.asarray(total)
    step.call([_W, total, *_batch(4)])
    np.testing.assert_array_equal(np.asarray(total), before)


def test_donated_arguments_that_xla_cannot_use_are_deleted() -> None:
    step = _single(lambda x: (x.sum(),), (8,), donated=True)
    (x,) = _single(lambda x: (x + 1,), (8,)).call([_W])
    step.call([x])
    assert x.is_deleted()


def test_values_are_freed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[jax.Array]] = []
    most = 0
    original = prepared.prepare_steps

    def watched(buffered: Any, calls: Any, orders: Any) -> Any:
        return original(buffered, [_watch(call) for call in calls], orders)

    def _watch(call: Any) -> Any:
        def watching(args: Any) -> Any:
            nonlocal most
            results = call(args)
            alive.extend(weakref.ref(result) for result in results)
            most = max(most, sum(ref() is not None for ref in alive))
            return results

        return watching

    monkeypatch.setattr(prepared, "prepare_steps", watched)
    step = compile_plan(accumulation(4))
    results = step.call([_W, _TOTAL, *_batch(4)])
    del results
    gc.collect()
    assert most <= 8  # four hidden values and what one step makes and takes
    assert not any(ref() is not None for ref in alive)


def test_deleted_argument_says_where_it_went() -> None:
    step = compile_plan(accumulation(2), name="train_step")
    w, total = step.call([_W, _TOTAL, *_batch(2)])
    step.call([w, total, *_batch(2)])
    for _ in range(2):
        with pytest.raises(ExecutionError) as caught:
            step.call([w, total, *_batch(2)])
        assert str(caught.value).startswith(
            "The argument `w` of `train_step`, `float32[8]`, is deleted: "
            "it was donated to a call of `train_step`.\nTo mend it, either:\n"
            "  1. use what the call returned, as in `state = step(state, batch)`."
        )


def test_array_deleted_by_hand() -> None:
    step = _single(lambda x: (x + 1,), (8,))
    (x,) = step.call([_W])
    x.delete()
    with pytest.raises(ExecutionError, match="donated to an earlier call or deleted by hand"):
        step.call([x])


def _failing(args: Any) -> Any:
    raise MemoryError("no room")


def test_interrupted_step_says_so() -> None:
    step = compile_plan(accumulation(2), name="train_step")
    w, total = step.call([_W, _TOTAL, *_batch(2)])
    steps = step._steps
    step._steps = (*steps[:-1], (_failing, *steps[-1][1:]))
    with pytest.raises(ExecutionError, match="The task `update` failed: no room") as caught:
        step.call([w, total, *_batch(2)])
    assert isinstance(caught.value.__cause__, MemoryError)
    step._steps = steps
    assert total.is_deleted()
    with pytest.raises(ExecutionError) as caught:
        step.call([w, total, *_batch(2)])
    assert str(caught.value) == (
        "The argument `total` of `train_step`, `float32[8]`, is deleted: "
        "it was donated to a call of `train_step` that was interrupted.\n"
        "To mend it, either:\n"
        "  1. go back to a checkpoint.\n"
        "  2. keep a copy of the state beside the donated one."
    )
    np.testing.assert_allclose(w, _expected(_W, _TOTAL, _batch(2))[0], rtol=1e-5)
    step.call([_W, _TOTAL, *_batch(2)])  # the next call works


def test_interrupt_comes_after_the_step() -> None:
    step = compile_plan(accumulation(2), name="train_step")
    w, total = step.call([_W, _TOTAL, *_batch(2)])
    calls, steps = [], step._steps

    def interrupted(args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return steps[0][0](args)

    def last(args: Any) -> Any:
        calls.append("last")
        return steps[-1][0](args)

    step._steps = ((interrupted, *steps[0][1:]), *steps[1:-1], (last, *steps[-1][1:]))
    with pytest.raises(KeyboardInterrupt):
        step.call([w, total, *_batch(2)])
    step._steps = steps
    assert calls == ["last"]
    with pytest.raises(ExecutionError, match="that was interrupted"):
        step.call([w, total, *_batch(2)])
    step.call([_W, _TOTAL, *_batch(2)])


def test_failing_callback_keeps_its_cause() -> None:
    def fail(x: np.ndarray) -> np.ndarray:
        raise ValueError("boom")

    builder = PlanBuilder()
    place = submesh(0, (0,))  # on two, JAX itself aborts: the other device waits for ever
    x = builder.argument("x", (8,), place)
    y = builder.task("call", lambda x: (jax.pure_callback(fail, jax.typeof(x), x),), place, [x])
    step = compile_plan(builder.plan(*y))
    with pytest.raises((ExecutionError, jax.errors.JaxRuntimeError), match="boom"):
        jax.block_until_ready(step.call([_W]))


def test_same_array_donated_twice() -> None:
    step = _single(lambda x, y: (x + 1, y + 2), (8,), (8,), donated=True)
    first, second = step.call([_W, _W])
    got = step.call([first, first])
    np.testing.assert_allclose(got[0], _W + 2)
    np.testing.assert_allclose(got[1], _W + 3)
    assert first.is_deleted() and not second.is_deleted()


def test_donated_and_undonated() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    x = builder.argument("x", (8,), place, donated=True)
    y = builder.argument("y", (8,), place)
    results = builder.task("add", lambda x, y: (x + y,), place, [x, y])
    array = jax.device_put(_W, builder.slots[x].sharding)
    step = compile_plan(builder.plan(*results))
    with pytest.raises(ExecutionError, match="`x` is donated to `step` and also passed"):
        step.call([array, array])
    np.testing.assert_allclose(array, _W)


def test_pass_through_and_twice_the_same() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    x = builder.argument("x", (8,), place, donated=True)
    builder.argument("unused", (8,), place)
    (y,) = builder.task("add", lambda x: (x + 1,), place, [x])
    step = compile_plan(builder.plan(x, y, y))
    array = jax.device_put(_W, builder.slots[x].sharding)
    first, second, third = step.call([array, _W])
    assert first is array and second is third
    np.testing.assert_allclose(first, _W)


def test_constant_as_result_is_a_new_array_each_time() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    constant = builder.constant(_W, place)
    step = compile_plan(builder.plan(constant))
    (first,) = step.call([])
    first.delete()
    np.testing.assert_array_equal(step.call([])[0], _W)


def test_explicit_axis_types_and_a_mesh_of_the_user() -> None:
    builder = PlanBuilder()
    place = submesh(0, (2, 3), explicit=True)
    x = builder.argument("x", (8, 4), place, P("data"))
    (y,) = builder.task("contract", lambda x: (x.T @ x,), place, [x], [P("data")])
    plan = builder.plan(y)
    other = jax.make_mesh((4,), ("model",), devices=jax.devices()[4:])
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    with jax.set_mesh(other), jax.make_user_context("none")("mine"):
        step = compile_plan(plan)
        (got,) = step.call([value])
        step.call([jax.device_put(value, builder.slots[x].sharding)])
    assert got.sharding == builder.slots[y].sharding
    assert got.sharding.mesh.axis_types == (AxisType.Explicit,) * 2
    np.testing.assert_allclose(got, value.T @ value)


def test_typed_keys() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    key = jax.random.key(7)
    slot = builder.argument("key", jax.ShapeDtypeStruct((), key.dtype), place, donated=True)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new, use = jax.random.split(key)
        return new, jax.random.normal(use, (8,))

    step = compile_plan(builder.plan(*builder.task("draw", draw, place, [slot], [P(), P("data")])))
    want_key, want = draw(key)
    new, got = step.call([key])
    assert jnp.array_equal(jax.random.key_data(new), jax.random.key_data(want_key))
    np.testing.assert_array_equal(got, want)
    before = counters.snapshot()
    step.call([new])
    assert counters.since(before).argument_moves == 0


def test_effects_and_callbacks_run() -> None:
    seen = []

    def body(x: jax.Array) -> tuple[jax.Array]:
        jax.debug.callback(lambda x: seen.append(float(x)), x[0], ordered=False)
        return (x + 1,)

    builder = PlanBuilder()
    place = submesh(0, (0,))
    slot = builder.argument("x", (8,), place)
    step = compile_plan(builder.plan(*builder.task("effect", body, place, [slot])))
    for _ in range(2):
        step.call([_W])
    jax.effects_barrier()
    assert seen == [0.5, 0.5]


def test_debug_nans_names_the_task() -> None:
    step = _single(lambda x: (jnp.log(x),), (8,))
    step.call([-_W])
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match="task `only` made a NaN"):
        step.call([-_W])


def test_equal_executables_are_compiled_once() -> None:
    builder = PlanBuilder()
    place = submesh(0, (0, 1))
    x = builder.argument("x", (8,), place)
    first = builder.executable("layer", lambda x: (jnp.tanh(x),), place, [x], [P()])
    builder.executables.append(builder.executables[first])
    (y,) = builder.run(first, [x])
    (z,) = builder.run(first + 1, [y])
    before = counters.snapshot()
    step = compile_plan(builder.plan(y, z))
    assert counters.since(before).compiles == 1
    assert list(step.executables) == ["layer"]


def test_programs_are_named_after_their_executable() -> None:
    step = _single(lambda x: (x + 1,), (8,))
    assert "HloModule jit_only" in step.executables["only"].as_text()


def test_shardings_and_analyses() -> None:
    plan = accumulation(3)
    step = compile_plan(plan)
    assert step.input_shardings == tuple(plan.slots[e.slots[0]].sharding for e in plan.inputs)
    assert step.output_shardings == tuple(plan.slots[slot].sharding for slot in plan.outputs)
    assert step.cost_analysis()["flops"] > 3 * 8
    memory = step.memory_analysis()
    # on two devices w, hidden and total are halves; `x` is whole
    assert memory.argument_size_in_bytes == 4 * (8 + 3 * 4 + 2 * 4)
    assert memory.alias_size_in_bytes == 4 * (2 * 4 + 4)


def test_threads_take_turns() -> None:
    step = compile_plan(accumulation(3, donated=False))
    want = _expected(_W, _TOTAL, _batch(3))
    failures = []

    def work() -> None:
        w = jax.device_put(_W, NamedSharding(submesh(1, (2, 3)).mesh, P("data")))
        for _ in range(5):
            _, total = step.call([w + 0, _TOTAL, *_batch(3)])
            if not np.allclose(total, want[1], rtol=1e-5):
                failures.append(total)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_dispatch_cost_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    import timeit

    builder = PlanBuilder()
    place = submesh(0, (0,))
    slots = [builder.argument(f"a{i}", (2,), place, donated=True) for i in range(1000)]
    results = builder.task(
        "all", lambda *xs: tuple(x + 1 for x in xs), place, slots, [P()] * len(slots)
    )
    step = compile_plan(builder.plan(*results))
    sharding = builder.slots[0].sharding
    state = step.call(jax.device_put([np.zeros(2, np.float32)] * 1000, [sharding] * 1000))
    empty = [None] * len(step.buffered.plan.slots)
    state = step.call(state)
    load = min(timeit.repeat(lambda: step._inputs.load(state, empty), number=1, repeat=20))
    with capsys.disabled():
        print(f"\nloading 1000 arrays in place: {load * 1e3:.3f} us an array")
    assert all(empty[slot] is array for slot, array in zip(slots, state, strict=True))
