"""A train state with all that states hold, and a pipelined step, for the tests of checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec as P

from multimesh.jax import MultiMesh, microbatch, mjit, with_sharding_constraint

WIDTH = 8
NUM_LAYERS = 2
BATCH = tuple(np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32))


class State(TrainState):
    """With a step counter that begins as a Python number, keys, and leaves that are None."""

    key: Any = None
    nothing: Any = None
    average: Any = None  # of the parameters, in bfloat16


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.masked(optax.trace(0.9), lambda params: {name: name[0] == "w" for name in params}),
    optax.scale_by_schedule(optax.cosine_decay_schedule(-0.1, 10)),
)


def make_state() -> State:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    params = {f"w{i}": jax.random.normal(key, (WIDTH, WIDTH)) for i, key in enumerate(keys)}
    params |= {f"b{i}": jnp.zeros(WIDTH) for i in range(NUM_LAYERS)}
    return State.create(
        apply_fn=forward,
        params=params,
        tx=optimizer,
        key=jax.random.key(1),
        average={name: value.astype(jnp.bfloat16) for name, value in params.items()},
    )


def forward(params: Any, x: Any, key: Any) -> Any:
    for i in range(NUM_LAYERS):
        with jax.named_scope(f"layer{i}"):
            spec = P("data", "model") if i % 2 else P("model", None)
            w = with_sharding_constraint(params[f"w{i}"], spec)
            x = jnp.tanh(x @ w + params[f"b{i}"])
            if i == 0:
                x *= jax.random.bernoulli(key, 0.9, x.shape)
    return x


def train_step(state: State, batch: Any) -> tuple[State, jax.Array]:
    key, dropout = jax.random.split(state.key)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((forward(params, x, dropout) - y) ** 2)

    gradient = microbatch(jax.value_and_grad(loss), 0, 4, argnum=1, reduce="mean")
    value, grads = gradient(state.params, batch)
    state = state.apply_gradients(grads=grads)
    average = jax.tree.map(
        lambda mean, new: (0.5 * mean + 0.5 * new).astype(jnp.bfloat16), state.average, state.params
    )
    return state.replace(key=key, average=average), value


def make_multi_mesh(*sizes: int, explicit: bool = False) -> MultiMesh:
    """Axes stage, data and model on the last devices, those that are no JAX default."""
    devices = jax.devices()[-int(np.prod(sizes)) :]
    names = ("stage", "data", "model")
    types = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,) * 3
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=types)
    multi_mesh = MultiMesh(global_mesh=mesh)
    multi_mesh.register_layers(r"layer(\d+)", num_layers=NUM_LAYERS)
    return multi_mesh


def make_step(*sizes: int, donate: bool = True, explicit: bool = False) -> Any:
    with make_multi_mesh(*sizes, explicit=explicit):
        return mjit(train_step, donate_argnums=(0,) if donate else ())


def compiled(step: Any) -> Any:
    return step.lower(jax.eval_shape(make_state), BATCH).compile()


def run(step: Any, state: Any, num_steps: int) -> Any:
    for _ in range(num_steps):
        state, _ = step(state, BATCH)
    return state


def same_bits(one: Any, other: Any) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(bits(a) == bits(b) for a, b in pairs)


def bits(x: Any) -> Any:
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.int32), jax.dtypes.prng_key):
        return bits(jax.random.key_data(x)), str(x.dtype)
    array = np.asarray(x)
    return array.dtype, array.shape, array.tobytes()


def lie_alike(one: Any, other: Any) -> bool:
    """Whether arrays lie in the same places, however those are written."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
