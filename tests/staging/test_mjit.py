"""`mjit` end to end: results, one trace, no move of state, caches, donation, composition."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh._src.errors import MeshError, TraceError
from multimesh._src.runtime import counters
from multimesh.jax import MultiMesh, Task, ignore_transforms, mjit
from tests.staging import models


@pytest.fixture(params=[False, True], ids=["auto", "explicit"])
def multi_mesh(request: pytest.FixtureRequest) -> MultiMesh:
    return models.make_multi_mesh(explicit=request.param)


@pytest.mark.parametrize("num_steps", [1, 5])
def test_training_is_plain_training(multi_mesh: MultiMesh, num_steps: int) -> None:
    batches = models.make_batches(5)
    step = mjit(models.step, donate_argnums=0)
    state, losses = models.make_state(), []
    with multi_mesh:
        for batch in batches[:num_steps]:
            state, value = step(state, batch)
            losses.append(value)
    plain = models.repeated(models.step, num_steps)
    submesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    models.compare_once((state, losses), plain, submesh, models.make_state(), batches)


def test_state_stays_and_nothing_is_traced_again(multi_mesh: MultiMesh) -> None:
    step = mjit(models.step, donate_argnums=0)
    batches = models.make_batches(5)
    with multi_mesh:
        before = counters.snapshot()
        state, _ = step(models.make_state(), batches[0])
        assert counters.since(before).traces == 1
        where = jax.tree.map(lambda x: x.sharding, state)
        before = counters.snapshot()
        for batch in batches[1:]:
            state, _ = step(state, batch)
        counts = counters.since(before)
    assert (counts.traces, counts.lowerings, counts.compiles, counts.argument_moves) == (0, 0, 0, 0)
    assert jax.tree.map(lambda x: x.sharding, state) == where
    for i, layer in enumerate(state["params"]):
        stage = multi_mesh.slice(stage=i // 2)
        assert layer["w"].sharding.mesh == stage  # axis types included
    assert len(state["count"].sharding.device_set) == 8


def test_state_on_the_global_mesh_fits_the_first_variant(multi_mesh: MultiMesh) -> None:
    step = mjit(models.step)
    whole = NamedSharding(multi_mesh.global_mesh, P())
    batch = models.make_batches(1)[0]
    with multi_mesh:
        step(models.make_state(), batch)
        before = counters.snapshot()
        step(jax.device_put(models.make_state(), whole), batch)
    assert counters.since(before).traces == 0


def test_another_spec_is_another_variant() -> None:
    multi_mesh = models.make_multi_mesh()
    step = mjit(models.step)
    batch = models.make_batches(1)[0]
    state = models.make_state()
    with multi_mesh:
        first, _ = step(state, batch)
        sharded = NamedSharding(multi_mesh.slice(stage=0), P("data", "model"))
        state["params"][0]["w"] = jax.device_put(state["params"][0]["w"], sharded)
        before = counters.snapshot()
        second, _ = step(state, batch)
        assert counters.since(before).traces == 1
        third, _ = step(second, batch)
        assert counters.since(before).traces == 1
    assert third["params"][0]["w"].sharding.spec == P("data", "model")
    assert first["params"][0]["w"].sharding.spec != P("data", "model")


def test_other_shapes_types_and_settings_are_other_keys() -> None:
    multi_mesh = models.make_multi_mesh()
    traces = 0

    def f(x: Any) -> Any:
        nonlocal traces
        traces += 1
        with jax.named_scope("layer0"):
            y = x * 2
        with jax.named_scope("layer2"):
            return y + 1

    g = mjit(f)
    with multi_mesh:
        for x in (np.ones(8, np.float32), np.ones(4, np.float32), np.ones(8, np.int32), 1.0):
            g(x)
            g(x)
        assert traces == 4
        g(np.float32(1.0))  # not weakly typed
        assert traces == 5
        with jax.default_matmul_precision("float32"):
            g(1.0)
        assert traces == 6
    with models.make_multi_mesh():
        g(1.0)
    assert traces == 7


def test_registration_after_the_first_call_counts() -> None:
    multi_mesh = MultiMesh(axis_sizes=(2, 4), axis_names=("stage", "data"))
    multi_mesh.register_task("first", task=Task(mesh_slice={"stage": 0}))

    def f(x: Any) -> Any:
        with jax.named_scope("first"):
            y = x * 2
        with jax.named_scope("second"):
            return y @ y

    g = mjit(f)
    x = np.ones((8, 8), np.float32)
    with multi_mesh:
        assert models.devices_of(g(x)) == [(0, 1, 2, 3)]
        multi_mesh.register_task("second", task=Task(mesh_slice={"stage": 1}))
        assert models.devices_of(g(x)) == [(4, 5, 6, 7)]


def test_donated_arguments_are_deleted_and_their_use_is_an_error() -> None:
    step = mjit(models.step, donate_argnames="state")
    batch = models.make_batches(1)[0]
    with models.make_multi_mesh():
        first, _ = step(models.make_state(), batch)
        second, _ = step(first, batch)
        assert first["params"][0]["w"].is_deleted()
        with pytest.raises(Exception, match="state"):
            step(first, batch)
        third, _ = step(second, batch)
    assert int(third["count"]) == 3


def test_undonated_arguments_stay_valid() -> None:
    step = mjit(models.step)
    batch = models.make_batches(1)[0]
    with models.make_multi_mesh():
        first, _ = step(models.make_state(), batch)
        second, _ = step(first, batch)
        again, _ = step(first, batch)
    for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)  # a repeated run is bitwise equal


def test_static_and_keyword_arguments() -> None:
    def f(x: Any, power: int, *, mode: str, shift: Any) -> Any:
        with jax.named_scope("layer0"):
            y = x**power
        with jax.named_scope("layer3"):
            return y + shift if mode == "add" else y - shift

    g = mjit(f, static_argnums=1, static_argnames="mode")
    x = np.full((4, 4), 3.0, np.float32)
    with models.make_multi_mesh():
        assert float(g(x, 2, mode="add", shift=1.0)[0, 0]) == 10.0
        assert float(g(x, power=2, mode="sub", shift=1.0)[0, 0]) == 8.0
        assert float(g(x, 3, mode="add", shift=1.0)[0, 0]) == 28.0


def test_decorator_and_method() -> None:
    class Model:
        scale = 3.0

        @mjit(static_argnums=0)
        def apply(self, x: Any) -> Any:
            """Scales."""
            return x * self.scale

    assert Model.apply.__doc__ == "Scales."
    assert float(Model().apply(jnp.float32(2.0))) == 6.0


def test_outputs_of_all_kinds() -> None:
    """None, empty trees, literals, an input, one value twice, an unused argument, a key."""

    def f(x: Any, unused: Any, key: Any) -> Any:
        with jax.named_scope("layer0"):
            y = jnp.sin(x)
        with jax.named_scope("layer3"):
            z = y @ y
        return None, x, (z, z), {}, 3.0, y, key, jax.random.split(key)[0]

    x, key = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4), jax.random.key(1)
    with models.make_multi_mesh():
        got = mjit(f)(x, np.ones(100, np.float32), key)
    want = jax.jit(f)(x, np.ones(100, np.float32), key)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a).weak_type == jax.typeof(b).weak_type and a.dtype == b.dtype
        if models._is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_closed_over_arrays() -> None:
    big = jnp.arange(256.0).reshape(16, 16) / 256

    def f(x: Any) -> Any:
        with jax.named_scope("layer0"):
            y = x @ big
        with jax.named_scope("layer3"):
            return y @ big

    x = np.ones((4, 16), np.float32)
    with models.make_multi_mesh():
        got = mjit(f)(x)
    np.testing.assert_allclose(got, jax.jit(f)(x), rtol=1e-6)


def test_shardings_of_arguments_and_results() -> None:
    multi_mesh = models.make_multi_mesh()
    stage0, stage1 = multi_mesh.slice(stage=0), multi_mesh.slice(stage=1)

    def f(x: Any, w: Any) -> Any:
        with jax.named_scope("layer0"):
            y = x @ w
        with jax.named_scope("layer3"):
            return y + 1, y * 2

    with multi_mesh:
        g = mjit(
            f,
            in_shardings=(P("data"), NamedSharding(stage0, P(None, "model"))),
            out_shardings=(P("model"), NamedSharding(stage0, P("data", None))),
        )
        x = np.ones((8, 8), np.float32)
        first, second = g(x, x)
        (places, _) = g.lower(x, x).compile().input_shardings
    assert first.sharding.is_equivalent_to(NamedSharding(stage1, P("model")), 2)
    assert second.sharding.is_equivalent_to(NamedSharding(stage0, P("data")), 2)
    assert places[0].is_equivalent_to(NamedSharding(stage0, P("data")), 2)
    assert places[1].is_equivalent_to(NamedSharding(stage0, P(None, "model")), 2)


# --- composition ---------------------------------------------------------------------------------


def test_nested_in_a_jit_it_inlines() -> None:
    inner = mjit(models.loss)
    params, (x, y) = models.make_params(), models.make_batches(1)[0]
    want = jax.jit(models.loss)(params, x, y)
    assert float(jax.jit(inner)(params, x, y)) == float(want)
    with models.make_multi_mesh():
        outer = mjit(lambda p, x, y: 2 * inner(p, x, y))
        text = outer.lower(params, x, y).as_text()
        np.testing.assert_allclose(outer(params, x, y), 2 * want, rtol=1e-6)
    assert "stage=0" in text and "stage=1" in text
    assert "tanh" in str(jax.make_jaxpr(inner)(params, x, y))


def test_eval_shape_and_staging() -> None:
    step = mjit(models.step, donate_argnums=0)
    state, batch = models.make_state(), models.make_batches(1)[0]
    with models.make_multi_mesh():
        shapes = step.eval_shape(state, batch)
        traced = step.trace(state, batch)
        lowered = traced.lower()
        compiled = lowered.compile()
    assert shapes == jax.eval_shape(models.step, state, batch)
    assert traced.out_info == shapes and traced.fun_name == "step"
    assert lowered.program is not None and compiled.program is lowered.program
    assert "stage=0 -> stage=1" in str(compiled.explain())
    assert "0f" in lowered.as_text()
    assert "HloModule" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    new, value = compiled(state, batch)  # compiled objects may be called anywhere
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert compiled.output_shardings[0]["params"][3]["w"] == new["params"][3]["w"].sharding
    assert compiled.input_shardings[0][0]["params"][3]["w"] == new["params"][3]["w"].sharding
    assert float(value) > 0


def test_compiled_refuses_other_types() -> None:
    f = mjit(models.loss)
    params, (x, y) = models.make_params(), models.make_batches(1)[0]
    with models.make_multi_mesh():
        compiled = f.lower(params, x, y).compile()
    with pytest.raises(TraceError, match=r"argument `x` is `float32\[4, 16\]`.*`float32\[8, 16\]`"):
        compiled(params, x[:4], y)
    with pytest.raises(TraceError, match="tree"):
        compiled(params[:2], x, y)


# --- plain JAX (R15), configuration (R18, R19) ---------------------------------------------------


def test_without_tasks_it_is_plain_jax() -> None:
    f = mjit(lambda x: jnp.sin(x) * 2)
    before = counters.snapshot()
    got = f(jnp.ones(4))
    assert counters.since(before).compiles == 0
    np.testing.assert_array_equal(got, jax.jit(lambda x: jnp.sin(x) * 2)(jnp.ones(4)))
    assert f.lower(jnp.ones(4)).program is None
    assert "no tasks" in str(f.lower(jnp.ones(4)).explain())
    assert float(f.lower(jnp.float32(0)).compile()(jnp.float32(0))) == 0.0


def test_without_scopes_but_with_placed_arguments_it_is_ours() -> None:
    multi_mesh = models.make_multi_mesh()
    with multi_mesh:
        state, _ = mjit(models.step)(models.make_state(), models.make_batches(1)[0])
        norm = mjit(lambda tree: sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))
        ema = mjit(lambda tree: jax.tree.map(lambda x: 0.5 * x, tree))
        params = state["params"]
        want = sum(float(np.sum(np.square(x))) for x in map(np.asarray, jax.tree.leaves(params)))
        np.testing.assert_allclose(norm(params), want, rtol=1e-5)
        assert models.devices_of(ema(params)) == models.devices_of(params)


def test_ignore_transforms_after_a_step() -> None:
    step, batch = mjit(models.step), models.make_batches(1)[0]
    multi_mesh = models.make_multi_mesh()
    with multi_mesh:
        state, _ = step(models.make_state(), batch)
        ours, value = step(state, batch)
        with ignore_transforms():
            plain, plain_value = step(state, batch)
        with jax.disable_jit():
            _, eager_value = step(state, batch)
    np.testing.assert_allclose(value, plain_value, rtol=1e-6)
    np.testing.assert_allclose(value, eager_value, rtol=1e-6)
    assert set(models.devices_of(plain)) == {tuple(range(8))}
    assert len(set(models.devices_of(ours))) == 3


def test_users_mesh_changes_nothing() -> None:
    step, batch = mjit(models.step), models.make_batches(1)[0]
    with models.make_multi_mesh():
        want, _ = step(models.make_state(), batch)
    with jax.set_mesh(jax.make_mesh((8,), ("x",))), models.make_multi_mesh():
        got, _ = step(models.on_host(models.make_state()), batch)
        again, _ = step(got, batch)
    assert jax.tree.map(lambda a: (a.sharding.spec,), got) == jax.tree.map(
        lambda a: (a.sharding.spec,), want
    )
    np.testing.assert_array_equal(got["params"][0]["w"], want["params"][0]["w"])
    assert int(again["count"]) == 2


def test_warning_names_the_scopes() -> None:
    def f(x: Any) -> Any:
        with jax.named_scope("lair0"):
            return x * 2

    with models.make_multi_mesh(), pytest.warns(UserWarning, match="no task") as caught:
        mjit(f)(1.0)
    text = str(caught[0].message)
    assert "no task matched in `f`" in text
    assert "scopes in the program: `lair0`" in text
    assert r"`layer(\d+)`" in text
    assert caught[0].filename == __file__


# --- binding -------------------------------------------------------------------------------------


def test_made_inside_it_is_bound() -> None:
    multi_mesh = models.make_multi_mesh()
    with multi_mesh:
        step = mjit(models.step)
    state, _ = step(models.make_state(), models.make_batches(1)[0])
    assert models.devices_of(state["params"][3]) == [(4, 5, 6, 7)] * 2
    with multi_mesh:
        counters.snapshot()
        step(state, models.make_batches(1)[0])


def test_bound_function_inside_another_multi_mesh_is_an_error() -> None:
    with models.make_multi_mesh():
        step = mjit(models.step)
    with (
        models.make_multi_mesh(),
        pytest.raises(MeshError, match=r"`step` was made in .* and is called inside"),
    ):
        step(models.make_state(), models.make_batches(1)[0])


def test_made_outside_it_uses_the_context_of_the_call() -> None:
    step, batch = mjit(models.step), models.make_batches(1)[0]
    with models.make_multi_mesh():
        first, _ = step(models.make_state(), batch)
    with models.make_multi_mesh(layers_per_stage=3):
        second, _ = step(models.make_state(), batch)
    assert models.devices_of(first["params"][2]) == [(4, 5, 6, 7)] * 2
    assert models.devices_of(second["params"][2]) == [(0, 1, 2, 3)] * 2


def test_mesh_argument_stands_for_a_multi_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "data"))
    other = Mesh(np.array(jax.devices()), ("data",))
    f = mjit(lambda x: x * 2, mesh=mesh, out_shardings=P("data"))
    assert len(f(np.ones(8, np.float32)).sharding.device_set) == 8
    with models.make_multi_mesh(), pytest.raises(MeshError, match=r"`mjit\(mesh=\)`"):
        mjit(lambda x: x, mesh=other)


# --- robustness ----------------------------------------------------------------------------------


def test_failing_trace_leaves_the_function_usable() -> None:
    fail = True

    def f(x: Any) -> Any:
        with jax.named_scope("layer0"):
            y = x * 2
        if fail:
            raise RuntimeError("no")
        with jax.named_scope("layer3"):
            return y + 1

    g = mjit(f)
    with models.make_multi_mesh():
        with pytest.raises(RuntimeError, match="no"):
            g(np.ones(4, np.float32))
        fail = False
        assert float(g(np.ones(4, np.float32))[0]) == 3.0
    assert jax.jit(lambda x: x + 1)(1) == 2


def test_caches_hold_no_arrays_and_go_with_the_function() -> None:
    step, batch = mjit(models.step), models.make_batches(1)[0]
    with models.make_multi_mesh():
        state, _ = step(models.make_state(), batch)
        new, _ = step(state, batch)
    arrays = [weakref.ref(x) for x in jax.tree.leaves((state, new))]
    del state, new
    gc.collect()
    assert not any(array() is not None for array in arrays)
    function = weakref.ref(step._maker.fun)
    cache = weakref.ref(step)
    del step
    gc.collect()
    assert cache() is None and function() is models.step


def test_clear_caches_empties_ours() -> None:
    traces = 0

    def f(x: Any) -> Any:
        nonlocal traces
        traces += 1
        with jax.named_scope("layer0"):
            return x * 2

    g = mjit(f)
    with models.make_multi_mesh():
        g(np.ones(4, np.float32))
        g(np.ones(4, np.float32))
        assert traces == 1
        jax.clear_caches()
        g(np.ones(4, np.float32))
        assert traces == 2
        g.clear_cache()
        g(np.ones(4, np.float32))
    assert traces == 3


def test_python_scalars_in_a_state_stay_weak() -> None:
    def step(state: Any, x: Any) -> Any:
        with jax.named_scope("layer0"):
            x = x * state["lr"]
        with jax.named_scope("layer3"):
            return {"lr": state["lr"], "n": state["n"] + 1}, x.sum()

    g, x = mjit(step), np.ones(4, np.float32)
    with models.make_multi_mesh():
        before = counters.snapshot()
        state = {"lr": 0.5, "n": 0}
        for _ in range(3):
            state, total = g(state, x)
    assert counters.since(before).traces == 1
    assert state["lr"].weak_type and state["n"].weak_type and int(state["n"]) == 3
    assert float(total) == 2.0
