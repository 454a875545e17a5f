"""Every optimizer of optax in a pipelined training step: results, places and traffic.

Two stages, a microbatch loop, the state donated. What each optimizer computes is compared for three
steps; where its state lives, what runs before the loop and what crosses is read off the program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from multimesh.jax import microbatch, mjit
from tests.programs import optimizers
from tests.programs.optimizers import RATE, WIDTH, loss, params
from tests.programs.plainly import normal, pipeline
from tests.programs.training import arrays, check_once, train

# Two factories say that there is a better one, and one calls another with an old argument.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{name}.* is deprecated:DeprecationWarning")
    for name in ("optimistic_adam", "inject_stateful_hyperparams", "seed")
]

ROWS, MICROBATCHES, STEPS = 2, 2, 3
BATCHES = [(normal(4, WIDTH, seed=20 + k), normal(4, WIDTH, seed=30 + k)) for k in range(STEPS)]
ACTIVATIONS = {
    (f"stage={a} -> stage={b}", f"float32[{ROWS},{WIDTH}]"): MICROBATCHES
    for a, b in ((0, 1), (1, 0))
}

# Trained in every run of the tests: one of each kind. The others are `slow`.
TRAINED = (
    "adafactor", "adamw", "add_noise", "apply_if_finite", "clip_by_global_norm",
    "conditionally_transform", "ema", "flatten", "inject_hyperparams", "lbfgs", "multi_transform",
    "novograd", "polyak_sgd", "zero_nans", "contrib.muon", "contrib.reduce_on_plateau",
    "contrib.sam", "contrib.schedule_free",
)  # fmt: skip

# Plain `jax.jit` itself is too far from exact arithmetic to judge by (R1): ours is as near as it.
ILL_CONDITIONED = {
    "scale_by_zoom_linesearch": "reports how far a sum is off that should be zero",
    "scale_by_lbfgs": "divides by products of differences that are small",
    "scale_by_distance_over_gradients": "divides by a distance that is zero at first",
    "contrib.galore": "projects on singular vectors of equal values",
    "contrib.mechanize": "divides by a learning rate of 1e-6",
    "contrib.prodigy": "sums products that cancel at first",
    "contrib.scale_by_cocob": "sums products that cancel at first",
    "contrib.scale_by_galore": "projects on singular vectors of equal values",
}

# State that cannot lie with one parameter, or arithmetic that cannot lie with one gradient.
SHARED = {
    "flatten": "one vector of all parameters",
    "lbfgs": "a scan over all parameters, and a line search",
    "scale_by_backtracking_linesearch": "a search that runs the model",
    "scale_by_lbfgs": "a scan over all parameters",
    "scale_by_zoom_linesearch": "a search that runs the model",
    "contrib.mechanize": "a norm of the parameters: small ones are on every submesh",
    "contrib.sophia": "a cond that runs the model",
}


def step_of(optimizer: Any, name: str = "") -> Any:
    """A training step, as users write it."""

    def step(state: Any, batch: Any) -> Any:
        weights, opt = state
        grad = microbatch(jax.value_and_grad(loss), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(weights, batch)
        more = optimizers.extra(name, batch, value, grads)
        updates, opt = optimizer.update(grads, opt, weights, **more)
        return (optax.apply_updates(weights, updates), opt), value

    return step


def trained(optimizer: Any, name: str = "", *, ill_conditioned: bool = False) -> Any:
    state = (params(), optimizer.init(params()))
    step = step_of(optimizer, name)
    return train(pipeline(2), step, state, BATCHES, ill_conditioned=ill_conditioned)


def program_of(optimizer: Any, name: str = "") -> Any:
    """What becomes of the step, without running it."""
    state = (params(), optimizer.init(params()))
    with pipeline(2):
        return mjit(step_of(optimizer, name), donate_argnums=0).lower(state, BATCHES[0]).program


def _training_cases() -> list[Any]:
    slow = [name for name in optimizers.names() if name not in TRAINED]
    return [*TRAINED, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


def test_every_factory_is_found_and_can_be_made():
    found = optimizers.factories()
    assert len(found) > 100
    assert {*optimizers.GIVEN, *optimizers.EXCEPTIONS, *optimizers.EXTRA} <= {*found}
    assert {*TRAINED, *ILL_CONDITIONED, *SHARED} <= {*optimizers.names()}


@pytest.mark.parametrize("name", _training_cases())
def test_three_steps_are_those_of_plain_jit(name):
    trained(optimizers.make(name), name, ill_conditioned=name in ILL_CONDITIONED)


@pytest.mark.parametrize("name", [n for n in optimizers.names() if n not in SHARED])
def test_state_lives_with_its_parameter_and_nothing_else_crosses(name):
    """R7, R8: one owner; only activations and their gradients cross, and scalars."""
    program = program_of(optimizers.make(name), name)
    assert {key: n for key, n in arrays(program).items() if key not in ACTIVATIONS} == {}
    check_once(program)
    first = next(i for i, task in enumerate(program.tasks) if task.num_runs == MICROBATCHES)
    early = [task.parameters for task in program.tasks[:first] if task.parameters]
    assert early == [], "arithmetic on arguments before the loop"
    for argument in program.arguments:
        if argument.name.startswith("state"):
            assert argument.moved in ("first call", "never", "unused"), argument
        layer = next((f"layer{i}" for i in range(2) if f"'layer{i}'" in argument.name), None)
        if layer and argument.bytes > 4 and argument.home:
            assert argument.home == layer.replace("layer", "stage="), argument


# --- what wraps an optimizer, or has a step of its own --------------------------------------------


def test_multi_steps_accumulate_over_calls():
    trained(optax.MultiSteps(optax.adam(RATE), every_k_schedule=2))


def test_multi_steps_skip_what_is_not_finite():
    skip = optax.skip_not_finite
    trained(optax.MultiSteps(optax.sgd(RATE), 2, should_skip_update_fn=skip))


def test_what_people_chain():
    """Clipping, decay of matrices alone, a schedule with warm-up, and slow steps behind it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.scale_by_adam(mu_dtype=jnp.bfloat16),
        optax.masked(optax.add_decayed_weights(0.01), lambda p: jax.tree.map(np.ndim, p)),
        optax.scale_by_learning_rate(schedule),
    )
    program = trained(optimizer)
    assert {key: n for key, n in arrays(program).items() if key not in ACTIVATIONS} == {}


def test_lookahead_has_two_copies_of_the_parameters():
    optimizer = optimizers.make("lookahead")

    def step(state: Any, batch: Any) -> Any:
        weights, opt = state
        grad = microbatch(jax.value_and_grad(loss), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(weights.fast, batch)
        updates, opt = optimizer.update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), value

    both = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, params()))
    program = train(pipeline(2), step, (both, optimizer.init(both)), BATCHES)
    assert {key: n for key, n in arrays(program).items() if key not in ACTIVATIONS} == {}


@pytest.mark.parametrize("name", ["contrib.dpsgd", "contrib.differentially_private_aggregate"])
def test_gradients_of_each_example(name):
    factory = optimizers.factories()[name]
    if name == "contrib.dpsgd":
        optimizer = factory(RATE, l2_norm_clip=0.5, noise_multiplier=0.1, seed=5)
    else:
        key = jax.random.key(5)
        aggregate = factory(l2_norm_clip=0.5, noise_multiplier=0.1, key=key)
        optimizer = optax.chain(aggregate, optax.scale(-RATE))

    def step(state: Any, batch: Any) -> Any:
        weights, opt = state
        rows = jax.tree.map(lambda a: a[:, None], batch)
        one = jax.value_and_grad(loss)
        values, grads = jax.vmap(one, in_axes=(None, 0))(weights, rows)
        updates, opt = optimizer.update(grads, opt, weights)
        return (optax.apply_updates(weights, updates), opt), values.mean()

    train(pipeline(2), step, (params(), optimizer.init(params())), BATCHES)


def test_a_measure_of_the_gradients_is_averaged():
    measure = optax.measure_with_ema(optax.tree.norm, 0.9)

    def step(state: Any, batch: Any) -> Any:
        weights, measured = state
        grad = microbatch(jax.value_and_grad(loss), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(weights, batch)
        norm, measured = measure.update(grads, measured)
        weights = jax.tree.map(lambda w, g: w - RATE * g / norm, weights, grads)
        return (weights, measured), {"loss": value, "norm": norm}

    program = train(pipeline(2), step, (params(), measure.init(params())), BATCHES)
    assert {key: n for key, n in arrays(program).items() if key not in ACTIVATIONS} == {}


def test_loss_scaling_skips_steps_that_overflow():
    """An overflow halves the scale and leaves everything else as it was."""
    optimizer = optax.adam(RATE)

    def step(state: Any, batch: Any) -> Any:
        weights, opt, scale = state

        def scaled(weights: Any, batch: Any) -> Any:
            return loss(weights, batch) * scale

        grad = microbatch(jax.value_and_grad(scaled), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(weights, batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, new = optimizer.update(grads, opt, weights)
        stepped = (optax.apply_updates(weights, updates), new)

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        weights, opt = choose(stepped, (weights, opt))
        scale = jnp.where(finite, scale, scale / 2)
        return (weights, opt, scale), {"loss": value / scale, "finite": finite}

    overflow = (BATCHES[1][0], np.full_like(BATCHES[1][1], np.inf))
    batches = [BATCHES[0], overflow, BATCHES[2]]
    state = (params(), optimizer.init(params()), np.float32(8.0))
    program = train(pipeline(2), step, state, batches)
    assert not any("stage=" in edge.split(" -> ")[1] and "float32[6" in type_
                   for edge, type_ in arrays(program))  # fmt: skip


def test_average_of_parameters_in_the_step():
    optimizer = optax.adam(RATE)

    def step(state: Any, batch: Any) -> Any:
        (weights, opt), value = step_of(optimizer)((state["weights"], state["opt"]), batch)
        average = optax.incremental_update(weights, state["average"], 0.1)
        count = state["count"] + 1
        target = optax.periodic_update(weights, state["target"], count, 2)
        new = {"weights": weights, "opt": opt, "average": average, "target": target}
        return {**new, "count": count}, value

    state = {
        "weights": params(),
        "opt": optimizer.init(params()),
        "average": params(),
        "target": params(),
        "count": np.int32(0),
    }
    train(pipeline(2), step, state, BATCHES)
