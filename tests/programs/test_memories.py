"""Memory kinds of arguments, results and values inside programs (R6)."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from multimesh._src.errors import ShardingError
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.constraints import resolve_constraints
from multimesh._src.runtime.counters import counters
from multimesh.jax import mjit, with_sharding_constraint
from tests.programs.plainly import assert_close, layer, pipeline, weights
from tests.programs.stepped import (
    X,
    Y,
    check_by_oracle,
    descent,
    devices_of,
    forward,
    same,
    train,
)

MULTI = pipeline(2, 2)
GLOBAL = MULTI.global_mesh
ON_HOST = NamedSharding(GLOBAL, P("data"), memory_kind="pinned_host")


def memory_of(x):
    return x.sharding.memory_kind


def run(fun, *args, **options):
    with MULTI:
        return mjit(fun, **options)(*args)


def test_results_in_host_memory():
    fun = forward(same)
    put = run(lambda p, x: jax.device_put(fun(p, x), ON_HOST), weights(2), X)
    stated = run(fun, weights(2), X, out_shardings=ON_HOST)
    space = run(lambda p, x: jax.device_put(fun(p, x), jax.memory.Space.Host), weights(2), X)
    for result in (put, stated, space):
        assert memory_of(result) == "pinned_host"
        assert devices_of(result) == [2, 3]
        assert_close(result, jax.jit(fun)(weights(2), X))
    assert put.sharding.spec == P("data", None)


def momentum_step(to_device=same, to_host=same):
    def step(state, batch):
        params, moments = state
        params, value = train(same, 2)(params, batch)
        moments = jax.tree.map(lambda m, w: 0.9 * m + w, to_device(moments), params)
        return (params, to_host(moments)), value

    return step


def place_moments(sharding_of):
    def place(state):
        params, moments = state
        return jax.tree.map(jnp.array, params), [
            jax.device_put(m, sharding_of(stage)) for stage, m in enumerate(moments)
        ]

    return place


def on_stage(stage):
    return NamedSharding(MULTI.slice(stage=stage), P("data"), memory_kind="pinned_host")


def on_one_device(stage):
    return SingleDeviceSharding(jax.devices()[stage], memory_kind="pinned_host")


@pytest.mark.parametrize("place", [on_stage, lambda _: ON_HOST, on_one_device])
@pytest.mark.parametrize("donate", [True, False])
def test_a_state_in_host_memory_returns_there(place, donate):
    state = (weights(2), weights(2))
    options = {} if donate else {"donate_argnums": ()}
    (params, moments), _ = check_by_oracle(
        pipeline(2, 2), momentum_step(), state, (X, Y), place=place_moments(place), **options
    )
    assert [memory_of(w) for w in params] == ["device"] * 2
    assert [memory_of(m) for m in moments] == ["pinned_host"] * 2
    assert [devices_of(m) for m in moments] == [[0, 1], [2, 3]]


def test_a_state_that_the_program_itself_moves():
    def to(space):
        return lambda tree: jax.device_put(tree, space)

    step = momentum_step(to(jax.memory.Space.Device), to(jax.memory.Space.Host))
    (_, moments), _ = check_by_oracle(
        pipeline(2, 2),
        step,
        (weights(2), weights(2)),
        (X, Y),
        plain=momentum_step(),
        place=place_moments(on_stage),
    )
    assert [memory_of(m) for m in moments] == ["pinned_host"] * 2


def test_a_state_in_another_memory_is_another_variant_and_stays_one():
    with pipeline(2, 2):
        step = mjit(momentum_step(), donate_argnums=0)
    hosted = place_moments(on_stage)((weights(2), weights(2)))
    params, moments = weights(2), weights(2)
    near = params, jax.device_put(moments, NamedSharding(GLOBAL, P()))
    before = counters.traces
    for _ in range(3):
        hosted, _ = step(hosted, (X, Y))
        near, _ = step(near, (X, Y))
    assert counters.traces - before == 2
    assert {memory_of(m) for m in hosted[1]} == {"pinned_host"}
    assert {memory_of(m) for m in near[1]} == {"device"}


def test_in_shardings_in_host_memory():
    fun = forward(same)
    with pipeline(2, 2):
        step = mjit(fun, in_shardings=([ON_HOST, ON_HOST], None))
        lowered = step.lower(weights(2), X).compile()
    (params, _), _ = lowered.input_shardings
    assert {s.memory_kind for s in params} == {"pinned_host"}
    assert_close(step(weights(2), X), jax.jit(fun)(weights(2), X))


def on_one_host():
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def test_scalars_small_arrays_and_what_passes_through_stay_in_host_memory():
    def step(state, batch):
        params, count, table, means = state
        params, value = train(same)(params, batch)
        return (params, count + 1, table, means * 0.5 + params[0][0, :3] + params[1][0, :3]), value

    kept = jnp.float32(0), jnp.ones((8, 8)), jnp.ones(3)
    params, *others = run(step, (weights(2), *jax.device_put(kept, on_one_host())), (X, Y))[0]
    assert {memory_of(w) for w in params} == {"device"}
    assert [memory_of(x) for x in others] == ["pinned_host"] * 3
    assert float(others[0]) == 1


def test_arrays_that_a_function_closes_over():
    table = jax.device_put(jnp.ones((8, 4)), on_one_host())
    result = run(forward(lambda x: x + table), weights(2), X)
    assert memory_of(result) == "device"
    assert_close(result, jax.jit(forward(lambda x: x + 1))(weights(2), X))


def test_a_batch_in_host_memory():
    batch = jax.device_put(X, on_one_host()), jax.device_put(Y, ON_HOST)
    with pipeline(2, 2):
        step = mjit(train(same, 2))
    before = counters.traces
    results = [step(weights(2), batch) for _ in range(3)]
    assert counters.traces - before == 1
    assert_close(results[2], jax.jit(train(same, 2))(weights(2), (X, Y)))


def test_eager_gradients():
    def loss(params, x):
        return forward(same)(params, x).sum()

    with pipeline(2, 2):
        step = mjit(loss)
    hosted = [jax.device_put(w, on_stage(stage)) for stage, w in enumerate(weights(2))]
    grads = jax.grad(step)(hosted, X)
    assert [memory_of(g) for g in grads] == ["pinned_host"] * 2, "as plain JAX gives them"
    assert_close(grads, jax.jit(jax.grad(loss))(weights(2), X))


@pytest.mark.parametrize("scoped", [True, False])
def test_a_value_carried_in_host_memory(scoped):
    def body(params):
        def step(x, _):
            x = jax.device_put(x, jax.memory.Space.Device)
            for number in range(1 if scoped else 2):
                with layer(number):
                    x = jnp.tanh(x @ params[number])
            return jax.device_put(x, jax.memory.Space.Host), None

        return step

    def fun(params, x):
        hosted = jax.device_put(x, jax.memory.Space.Host)
        x, _ = jax.lax.scan(body(params), hosted, None, length=3)
        with layer(1):
            return jax.device_put(x, jax.memory.Space.Device) @ params[1]

    assert_close(run(fun, weights(2), X), jax.jit(fun)(weights(2), X))


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def offloading(policy):
    def loss(params, batch):
        x, y = batch
        for number, w in enumerate(params):

            def block(x, w, number=number):
                with layer(number):
                    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
                    return jnp.sin(hidden @ w)

            x = jax.checkpoint(block, policy=policy)(x, w)
        return jnp.mean((x - y) ** 2)

    return loss


@pytest.mark.parametrize("size", [0, 2])
def test_residuals_that_a_policy_offloads(size):
    plain, step = descent(offloading(None), size), descent(offloading(OFFLOAD), size)
    check_by_oracle(pipeline(2, 2), step, weights(2), (X, Y), plain=plain)
    with pipeline(2, 2):
        plan = mjit(step).lower(weights(2), (X, Y)).compile()._backend.plan
    offloaded = [info for info in plan.slots if info.sharding.memory_kind == "pinned_host"]
    assert len(offloaded) == 2 * (4 if size else 1), "one residual a stage and microbatch"


def test_a_memory_that_devices_lack():
    def constrained(x):
        return with_sharding_constraint(x, NamedSharding(GLOBAL, P("data")))

    with MULTI:
        traced = jax.make_jaxpr(constrained)(X)
    (eqn,) = traced.eqns
    on_tape = jaxprs.replace_eqn(eqn, params={**eqn.params, "memory_kind": "tape"})
    closed = jaxprs.with_eqns(traced, [on_tape])
    with pytest.raises(ShardingError, match="`tape`; theirs are `device`, `pinned_host`") as caught:
        resolve_constraints(closed, (), GLOBAL, "task `layer0`")
    assert "test_memories.py" in str(caught.value)
