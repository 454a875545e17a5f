"""A `while` over several submeshes (R12): a loop that the host drives."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from multimesh._src.runtime import counters
from multimesh._src.staging.mjit import mjit
from tests.programs.judged import judge, judge_steps
from tests.programs.plainly import layer, mlp, normal, pipeline, sgd, square_loss, weights

X, Y = normal(8, 4, seed=10), normal(8, 4, seed=11)


def repeated(params, x, limit):
    def test(carry):
        return (carry[0] < limit) & (jnp.abs(carry[1]).max() < 1e3)

    def body(carry):
        return carry[0] + 1, mlp(params, carry[1]) * 1.5

    return lax.while_loop(test, body, (0, x))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_runs_as_long_as_the_condition_holds(limit, width):
    judge(pipeline(2, width), repeated, weights(2), X, limit)


def test_one_compiled_program_for_any_number_of_iterations():
    with pipeline(2):
        step = mjit(repeated)
    plain = jax.jit(repeated)
    step(weights(2), X, 1)
    before = counters.snapshot()
    for limit in (3, 0, 7):
        ours, expected = step(weights(2), X, limit), plain(weights(2), X, limit)
        assert int(ours[0]) == int(expected[0])
        np.testing.assert_allclose(ours[1], expected[1], rtol=1e-5, atol=1e-6)
    assert counters.since(before).compiles == 0


def test_texts_name_the_loop():
    with pipeline(2):
        lowered = mjit(repeated).lower(weights(2), X, 3)
    assert "While loop: layer0_fwd, layer1_fwd" in str(lowered.explain())
    assert "while" in lowered.as_text()


def test_what_is_only_read_crosses_once():
    """The parameters are used on the other submesh too, yet no iteration moves them."""

    def function(params, x, limit):
        def body(carry):
            count, x = carry
            with layer(0):
                x = jnp.tanh(x @ params[0])
            with layer(1):
                x = jnp.tanh(x @ params[1] + x @ params[0])
            return count + 1, x

        return lax.while_loop(lambda c: c[0] < limit, body, (0, x))

    staged = judge(pipeline(2), function, weights(2, 8), normal(2, 8), 4)
    (loop,) = _loops(staged, weights(2, 8), normal(2, 8), 4)
    crossing = [
        loop.plan.slots[slot].aval.shape
        for step in loop.plan.steps
        if hasattr(step, "sources")
        for slot in step.sources
    ]
    assert crossing == [(2, 8), (2, 8)]  # the activation, there and back


def _loops(staged, *args):
    plan = staged.trace(*args).lower()._partitioned.plan
    return [step for step in plan.steps if hasattr(step, "condition")]


# --- decoding ------------------------------------------------------------------------------------

VOCABULARY, LENGTH, WIDTH = 16, 12, 8


def decoder():
    return {
        "table": normal(VOCABULARY, WIDTH, seed=1),
        "layers": [normal(WIDTH, WIDTH, seed=n) / 2 for n in (2, 3, 4, 5)],
    }


def decode(params, prompt, end):
    """Greedy decoding with one cache per layer; stops when every row has said `end`."""
    rows, start = prompt.shape
    tokens = jnp.zeros((rows, LENGTH), jnp.int32).at[:, :start].set(prompt)
    caches = [jnp.zeros((rows, LENGTH, WIDTH)) for _ in params["layers"]]

    def body(carry):
        position, tokens, caches, done = carry
        new = []
        with layer(0):
            x = params["table"][lax.dynamic_index_in_dim(tokens, position, 1, False)]
        for index, (w, cache) in enumerate(zip(params["layers"], caches, strict=True)):
            with layer(index):
                cache = lax.dynamic_update_index_in_dim(cache, x @ w, position, 1)
                mask = jnp.arange(LENGTH) <= position
                scores = jnp.where(mask, jnp.einsum("rd,rld->rl", x, cache), -jnp.inf)
                x = x + jnp.einsum("rl,rld->rd", jax.nn.softmax(scores), cache)
            new.append(cache)
        with layer(3):
            said = jnp.argmax(x @ params["table"].T, -1).astype(jnp.int32)
        given = lax.dynamic_index_in_dim(tokens, position + 1, 1, False)
        said = jnp.where(position + 1 < start, given, said)
        tokens = lax.dynamic_update_index_in_dim(tokens, said, position + 1, 1)
        return position + 1, tokens, new, done | (said == end)

    def test(carry):
        return (carry[0] < LENGTH - 1) & ~carry[3].all()

    done = jnp.zeros(rows, bool)
    position, tokens, caches, _ = lax.while_loop(test, body, (0, tokens, caches, done))
    return position, tokens, caches


@pytest.mark.parametrize("num_stages", [2, 4])
def test_greedy_decoding_with_a_cache_per_stage(num_stages):
    prompt = np.array([[1, 2], [3, 4]], np.int32)
    staged = judge(pipeline(num_stages), decode, decoder(), prompt, 5)
    (loop,) = _loops(staged, decoder(), prompt, 5)
    caches = {s for s, info in enumerate(loop.plan.slots) if info.aval.shape == (2, LENGTH, WIDTH)}
    copied = {s for step in loop.plan.steps if hasattr(step, "sources") for s in step.sources}
    assert not caches & copied, "a cache leaves its stage"
    donated = [entry for entry in loop.plan.inputs if entry.donated and entry.slots[0] in caches]
    assert len(donated) == 4, "a cache is not written in place"


def test_sampling_with_a_typed_key_and_a_scan_inside_the_body():
    def function(params, x, key):
        def body(carry):
            count, x, key = carry
            key, sub = jax.random.split(key)

            def twice(x, _):
                return mlp(params, x), x.sum()

            x, sums = lax.scan(twice, x, None, length=2)
            return count + 1, x + jax.random.normal(sub, x.shape) + sums.mean(), key

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x, key))

    judge(pipeline(2), function, weights(2), X, jax.random.key(1))


# --- nesting -------------------------------------------------------------------------------------


def test_while_in_scan_and_while_in_while():
    def function(params, xs):
        def inner(x):
            return lax.while_loop(
                lambda c: (c[0] < 3) & (jnp.abs(c[1]).sum() > 0.5),
                lambda c: (c[0] + 1, mlp(params, c[1])),
                (0, x),
            )[1]

        def outer(carry):
            count, x = carry
            return count + 1, inner(x) * 2 + x

        scanned = lax.scan(lambda total, x: (total + inner(x), x.sum()), jnp.zeros((8, 4)), xs)
        return scanned, lax.while_loop(lambda c: c[0] < 2, outer, (0, xs[0]))

    judge(pipeline(2), function, weights(2), normal(3, 8, 4))


@pytest.mark.parametrize("flag", [True, False])
def test_while_in_a_branch_and_branch_in_a_while(flag):
    def function(params, x, flag):
        def body(carry):
            count, x = carry
            x = lax.cond(x.sum() > 0, lambda x: mlp(params, x), lambda x: -x, x)
            return count + 1, x

        def loop(x):
            return lax.while_loop(lambda c: c[0] < 3, body, (0, x))

        return lax.cond(flag, loop, lambda x: (-1, x), x)

    judge(pipeline(2), function, weights(2), X, flag)


def test_a_loop_in_a_branch_that_is_not_taken_does_not_run():
    seen = []

    def function(params, x, flag):
        def body(carry):
            with layer(0):
                jax.debug.callback(lambda count: seen.append(int(count)), carry[0])
            return carry[0] + 1, mlp(params, carry[1])

        def loop(x):
            return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

        return lax.cond(flag, loop, lambda x: x, x)

    with pipeline(2):
        step = mjit(function)
    for flag in (False, True):
        jax.block_until_ready(step(weights(2), X, flag))
        jax.effects_barrier()
        assert sorted(seen) == ([0, 1, 2] if flag else [])


def test_training_until_the_loss_is_small():
    def step(params, batch):
        def test(carry):
            return (carry[0] < 20) & (carry[2] > 0.5)

        def body(carry):
            count, params, _ = carry
            value, grads = jax.value_and_grad(square_loss)(params, batch)
            return count + 1, sgd(params, grads), value

        count, params, value = lax.while_loop(test, body, (0, params, jnp.float32(1)))
        return params, (count, value)

    judge_steps(pipeline(2), step, weights(2), (X, Y), steps=2)


def test_tangents():
    def function(params, x, limit):
        return jax.jvp(lambda p, x: repeated(p, x, limit)[1], (params, x), (params, x))

    judge(pipeline(2), function, weights(2), X, 3)


def test_batched_condition():
    def function(params, xs, limits):
        def one(x, limit):
            return lax.while_loop(
                lambda c: c[0] < limit, lambda c: (c[0] + 1, mlp(params, c[1])), (0, x)
            )

        return jax.vmap(one)(xs, limits)

    judge(pipeline(2), function, weights(2), X, np.arange(8) % 4)


def test_fori_loop_with_a_bound_that_is_an_argument():
    def function(params, x, limit):
        return lax.fori_loop(1, limit, lambda i, x: mlp(params, x) / i, x)

    judge(pipeline(2), function, weights(2), X, 4)


# --- what is carried -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_carries_that_swap_stay_or_come_from_outside(limit):
    def function(params, x, y, limit):
        def body(carry):
            count, a, b, c, _, _, f = carry
            new = mlp(params, a)
            return count + 1, b, new, c, y, new, jnp.ones_like(f)

        zero = jnp.zeros_like(x)
        init = (0, x, y, x + y, x, x, zero)
        return *lax.while_loop(lambda c: c[0] < limit, body, init), x

    with pipeline(2):
        staged = mjit(function)
    args = (weights(2), jnp.array(X), jnp.array(Y), limit)
    expected = jax.jit(function)(*args)
    for _ in range(2):  # the arguments stay valid
        ours = staged(*args)
        for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    judge(pipeline(2), function, *args)


def test_donated_state_with_several_calls():
    def step(state, x):
        params, caches = state

        def body(carry):
            count, caches = carry
            h, new = x, []
            for index, w in enumerate(params):
                with layer(index):
                    h = jnp.tanh(h @ w + caches[index])
                    new.append(caches[index] * 0.5 + h)
            return count + 1, new

        count, caches = lax.while_loop(lambda c: c[0] < 3, body, (0, caches))
        return (params, caches), count

    judge_steps(pipeline(2), step, (weights(2), [X * 0, X * 0]), X)


@pytest.mark.parametrize("limit", [0, 2])
def test_a_donated_argument_comes_back_from_a_loop_that_does_not_run(limit):
    with pipeline(2):
        staged = mjit(repeated, donate_argnums=1)
    ours, expected = jnp.array(X), jax.jit(repeated)(weights(2), X, limit)[1]
    count, ours = staged(weights(2), jax.device_put(ours, jax.devices()[1]), limit)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert int(count) == limit


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_long_loop_is_interrupted_between_two_iterations():
    def function(params, x, limit):
        def body(carry):
            with layer(0):
                jax.debug.callback(
                    lambda n: n == 3 and signal.raise_signal(signal.SIGINT), carry[0]
                )
            return carry[0] + 1, mlp(params, carry[1])

        return lax.while_loop(lambda c: c[0] != limit, body, (0, x))

    with pipeline(2):
        step = mjit(function)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            step(weights(2), X, 100_000)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(step(weights(2), X, 2)[0]) == 2


def test_nan_in_an_iteration_names_the_task():
    def function(params, x):
        def body(carry):
            with layer(0):
                x = jnp.log(carry[1] @ params[0])
            with layer(1):
                return carry[0] + 1, x @ params[1]

        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))

    with pipeline(2):
        step = mjit(function)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="layer0"):
        step(weights(2), -np.ones((8, 4), "float32"))
    step(weights(2), X)  # the next call works
