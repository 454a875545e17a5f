"""JAX's own settings at the call hold inside (R19)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from multimesh._src.errors import NonFiniteError
from multimesh._src.runtime import counters
from multimesh.jax import mjit
from tests.core import pipelined
from tests.programs.plainly import assert_close

WIDTH = pipelined.WIDTH
X = np.linspace(-1, 1, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)


def model(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return x


def make(fun, num_layers=2, **options):
    with pipelined.make_multi_mesh(2, layers_per_stage=num_layers // 2):
        return mjit(fun, **options)


def precisions(closed: jex.ClosedJaxpr) -> set[object]:
    return {e.params["precision"] for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"}


@pytest.mark.core
def test_x64():
    params = pipelined.make_params(2)
    step = make(lambda params, x: model(params, x * jnp.ones((), float)).sum())
    single = step(params, X)
    assert single.dtype == np.float32
    with jax.enable_x64(True):
        double = step(jax.tree.map(lambda w: np.asarray(w, np.float64), params), X.astype(float))
        assert double.dtype == np.float64
        plain = jax.jit(lambda p, x: model(p, x).sum())
        expected = plain(jax.tree.map(lambda w: np.asarray(w, np.float64), params), X.astype(float))
    np.testing.assert_allclose(double, expected, rtol=1e-13)
    before = counters.snapshot()
    assert step(params, X).dtype == np.float32
    assert counters.since(before).traces == 0, "each setting has its own compilation"


@pytest.mark.core
def test_x64_decides_weak_types_and_indices():
    def fun(x):
        with jax.named_scope("layer0"):
            y = x * 2 + jnp.arange(WIDTH)
        with jax.named_scope("layer1"):
            return y / 3, jnp.argmax(y, -1), jnp.float32(1) + jnp.ones((), float)

    step = make(fun)
    for enabled in (False, True, False):
        with jax.enable_x64(enabled):
            ours, plain = step(X), jax.jit(fun)(X)
        assert [r.dtype for r in ours] == [r.dtype for r in plain]
        assert_close(ours, plain)


def test_matmul_precision():
    params = pipelined.make_params(2)
    step = make(model)
    assert precisions(step.trace(params, X).jaxpr) == {None}
    with jax.default_matmul_precision("highest"):
        traced = step.trace(params, X)
    highest = jax.lax.Precision.HIGHEST
    assert precisions(traced.jaxpr) == {(highest, highest)}
    before = counters.snapshot()
    step(params, X)
    with jax.default_matmul_precision("highest"):
        step(params, X)
    assert counters.since(before).traces == 2


@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_a_task_that_makes_nan_or_infinity_is_named(flag):
    def fun(x):
        with jax.named_scope("layer0"):
            y = jnp.tanh(x)
        with jax.named_scope("layer1"):
            return jnp.log(y - 2) if flag == "debug_nans" else 1 / (y - y)

    step = make(fun)
    assert not np.isfinite(step(X)).any(), "without the setting nothing is checked"
    with getattr(jax, flag)(True), pytest.raises(NonFiniteError) as caught:
        step(X)
    text = str(caught.value)
    assert "task `layer1_fwd`" in text
    assert ("made a NaN" if flag == "debug_nans" else "made an infinity") in text
    assert "float32[8,32]" in text
    assert isinstance(caught.value, FloatingPointError), "as in plain JAX"
    assert not np.isfinite(step(X)).any(), "and the next call works"


def test_a_microbatch_that_makes_a_nan_is_named():
    params = pipelined.make_params()
    batch = (np.ones((16, WIDTH), np.float32), np.zeros((16, WIDTH), np.float32))
    batch[0][5, 3] = np.nan
    with pipelined.make_multi_mesh():
        step = mjit(pipelined.step)
    with jax.debug_nans(True), pytest.raises(NonFiniteError) as caught:
        step((params, pipelined.optimizer.init(params)), batch)
    assert "iteration 2" in str(caught.value) and "task `layer0_fwd" in str(caught.value)


def test_disable_jit_is_plain_jax():
    seen = []

    def fun(params, x):
        y = model(params, x)
        seen.append(type(y))
        return y.sum()

    params = pipelined.make_params(2)
    step = make(fun)
    expected = step(params, X)
    with jax.disable_jit():
        result = step(params, X)
    assert issubclass(seen[-1], jax.Array) and not issubclass(seen[-1], jax.core.Tracer)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_disable_jit_takes_a_state_that_lies_on_stages():
    state = pipelined.make_state()
    with pipelined.make_multi_mesh():
        step = mjit(pipelined.step)
    state, _ = step(state, pipelined.BATCH)
    expected = step(state, pipelined.BATCH)
    with jax.disable_jit():
        assert_close(step(state, pipelined.BATCH), expected)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_bits_are_those_of_plain_jax(implementation):
    def fun(seed, x):
        key = jax.random.key(seed)
        for i in range(2):
            with jax.named_scope(f"layer{i}"):
                x = x + jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return x, jax.random.key_data(key)

    step = make(fun)
    with jax.default_prng_impl(implementation):
        ours, key = step(np.uint32(7), X)
        plain, plain_key = jax.jit(fun)(np.uint32(7), X)
    np.testing.assert_array_equal(key, plain_key)
    if implementation == "threefry2x32":  # bits of the others depend on layout in JAX itself
        np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-6)


def test_log_compiles_names_the_tasks(caplog):
    step = make(model)
    with jax.log_compiles(True), caplog.at_level("WARNING"):
        step(pipelined.make_params(2), X)
    assert "layer0_fwd" in caplog.text and "layer1_fwd" in caplog.text


def test_leaks_are_found():
    leaked = []

    def fun(params, x):
        leaked.append(model(params, x))
        return leaked[-1].sum()

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        make(fun)(pipelined.make_params(2), X)
