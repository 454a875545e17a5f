"""Values placed inside programs by `jax.device_put` and `jax.reshard` (R6)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from multimesh._src.errors import ShardingError
from multimesh.jax import Context, MultiMesh, mjit, with_sharding_constraint
from tests.programs.plainly import assert_close, layer, normal, pipeline, weights
from tests.programs.stepped import X, Y, check_by_oracle, devices_of, forward, same, train

MULTI = pipeline(2, 2)
GLOBAL = MULTI.global_mesh
STAGE_1 = NamedSharding(MULTI.slice(stage=1), P("data"))
OTHER = NamedSharding(Mesh(np.array(jax.devices()[6:8]), ("z",)), P("z"))
ON_HOST = NamedSharding(GLOBAL, P("data"), memory_kind="pinned_host")


def run(fun, *args, multi=MULTI, **options):
    with multi:
        return mjit(fun, **options)(*args)


# --- device_put ----------------------------------------------------------------------------------

PUTS = {
    "global": lambda x: jax.device_put(x, NamedSharding(GLOBAL, P("data"))),
    "spec": lambda x: jax.device_put(x, P("data")),
    "submesh": lambda x: jax.device_put(x, STAGE_1),
    "other mesh": lambda x: jax.device_put(x, OTHER),
    "device": lambda x: jax.device_put(x, jax.devices()[5]),
    "single": lambda x: jax.device_put(x, SingleDeviceSharding(jax.devices()[5])),
    "nowhere": jax.device_put,
    "options": lambda x: jax.device_put(x, OTHER, src=STAGE_1, donate=True, may_alias=False),
    "tree": lambda x: jax.device_put({"a": x, "b": [x * 2]}, {"a": OTHER, "b": None})["a"],
    "one for all": lambda x: jax.device_put((x, x * 2), OTHER)[0],
    "memory": lambda x: jax.device_put(
        jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device
    ),
    "sharded memory": lambda x: with_sharding_constraint(
        lax.with_sharding_constraint(x, ON_HOST), NamedSharding(GLOBAL, P("data"))
    ),
    "reshard": lambda x: jax.sharding.reshard(x, OTHER),
    "reshard to a spec": lambda x: jax.sharding.reshard(x, P("data")),
    "asarray": lambda x: jnp.asarray(x, device=OTHER),
}


@pytest.mark.parametrize("name", PUTS)
@pytest.mark.parametrize("size", [0, 2])
def test_training_with_a_value_placed_by_hand(name, size):
    params, value = check_by_oracle(
        pipeline(2, 2), train(PUTS[name], size), weights(2), (X, Y), plain=train(same, size)
    )
    assert [devices_of(w) for w in params] == [[0, 1], [2, 3]]
    assert value.sharding.memory_kind == "device"


def test_a_value_runs_where_it_is_put():
    seen = {}

    def put(target):
        x = run(lambda p, x: jax.device_put(forward(same)(p, x), target) * 2, weights(2), X)
        seen[str(target)] = devices_of(x), x.sharding.spec
        return seen[str(target)]

    assert put(OTHER) == ([6, 7], P("z", None))
    assert put(STAGE_1) == ([2, 3], P("data", None))
    assert put(NamedSharding(GLOBAL, P("data"))) == ([2, 3], P("data", None))
    assert put(jax.devices()[5])[0] == [5]


def test_a_constant_is_put():
    table = normal(8, 4, seed=5)

    def put(x):
        return x + jax.device_put(table[: x.shape[0]], OTHER)

    for size in (0, 2):
        check_by_oracle(
            pipeline(2, 2),
            train(put, size),
            weights(2),
            (X, Y),
            plain=train(lambda x: x + table[: x.shape[0]], size),
            steps=1,
        )


def test_a_value_is_put_inside_loops_and_remat():
    def fun(params, x):
        def step(x, w):
            return jax.device_put(jnp.tanh(x @ w), OTHER) * 2, None

        with layer(0):
            x, _ = lax.scan(step, x, jnp.stack(params))
        with layer(1):
            return jax.checkpoint(lambda x: jnp.sin(jax.device_put(x, OTHER)))(x)

    def plain(params, x):
        for w in params:
            x = jnp.tanh(x @ w) * 2
        return jnp.sin(x)

    def gradients(fun):
        return lambda params, x: jax.value_and_grad(lambda p: fun(p, x).sum())(params)

    for ours, theirs in ((fun, plain), (gradients(fun), gradients(plain))):
        assert_close(run(ours, weights(2), X), jax.jit(theirs)(weights(2), X))


def test_placed_by_hand_alone():
    fun = run(lambda x: jax.device_put(x * 2, OTHER) + 1, X, multi=MultiMesh(global_mesh=GLOBAL))
    assert devices_of(fun) == [6, 7]
    np.testing.assert_array_equal(fun, X * 2 + 1)


def test_what_plain_jax_put_in_a_cached_trace_is_taken_too():
    @jax.jit
    def inner(x):
        return jax.device_put(jnp.sin(x), OTHER) * 2

    expected = inner(jax.device_put(X, OTHER))
    grads = jax.grad(lambda x: inner(x).sum())(jax.device_put(X, OTHER))
    fun = forward(inner)
    assert_close(run(fun, weights(2), X), jax.jit(forward(lambda x: jnp.sin(x) * 2))(weights(2), X))
    assert expected.shape == grads.shape


def test_under_vmap_and_jvp():
    fun, plain = forward(PUTS["other mesh"]), forward(same)
    xs = normal(3, 8, 4)
    mapped = run(jax.vmap(fun, (None, 0)), weights(2), xs)
    assert_close(mapped, jax.jit(jax.vmap(plain, (None, 0)))(weights(2), xs))
    tangents = run(lambda p, x: jax.jvp(lambda x: fun(p, x), (x,), (x,)), weights(2), X)
    assert_close(
        tangents, jax.jit(lambda p, x: jax.jvp(lambda x: plain(p, x), (x,), (x,)))(weights(2), X)
    )


# --- errors --------------------------------------------------------------------------------------


def error_of(put, multi=MULTI, **options):
    with pytest.raises(ShardingError) as caught:
        run(forward(put), weights(2), X, multi=multi, **options)
    return str(caught.value)


def test_a_target_that_says_how_dims_lie_in_memory():
    target = Format(Layout((1, 0)), OTHER)
    assert "format.sharding" in error_of(lambda x: jax.device_put(x, target))


def test_targets_that_are_no_prefix():
    text = error_of(lambda x: jax.device_put({"a": x}, {"b": OTHER})["a"])
    assert "no prefix" in text and "`device_put`" in text


def test_a_spec_that_is_too_long():
    text = error_of(lambda x: jax.device_put({"a": x}, P(None, None, "data"))["a"])
    assert "`3` entries" in text and "`device_put`['a']" in text


def test_a_spec_without_a_global_mesh():
    text = error_of(lambda x: jax.device_put(x, P("data")), Context())
    assert "no global mesh" in text


def test_a_value_that_is_put_elsewhere_inside_a_while_loop():
    def put(x):
        def step(state):
            number, x = state
            return number + 1, jax.device_put(x, OTHER) * 2

        return lax.while_loop(lambda state: state[1].sum() < 1e6, step, (0, jnp.abs(x) + 1))[1]

    text = error_of(put)
    assert "put on devices 6-7" in text
    assert "test_placed_values.py:" in text and "before the branch or loop" in text


def test_an_axis_that_does_not_divide_on_a_submesh():
    text = error_of(lambda x: jax.device_put(x[:3], P("data")))
    assert "`3` elements" in text and "test_placed_values.py:" in text
