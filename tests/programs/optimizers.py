"""Every public optimizer and transformation of optax, found by introspection, ready to train with.

    for name in names():              # "adam", "contrib.muon", ...
        optimizer = make(name)        # a GradientTransformationExtraArgs for `params()`

A factory is what says that it returns a GradientTransformation. It is called with a learning rate
where it wants one and as `GIVEN` says where it wants more; a bare `scale_by_...` is followed by a
small negative learning rate.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from tests.programs.plainly import normal

WIDTH = 6
RATE = 0.02

_MASK = {"layer0": True, "layer1": {"b": False, "w": True}}
_LABELS = {"layer0": "adam", "layer1": {"b": "adam", "w": "sgd"}}


def _sgd() -> Any:
    return optax.sgd(RATE)


def _every_other(step: Any, **extra: Any) -> Any:
    return step % 2 == 0


def _by_label(factory: Any) -> Any:
    return factory({"adam": optax.adam(RATE), "sgd": _sgd()}, _LABELS)


def _by_schedule(factory: Any) -> Any:
    return factory(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 5))


# How to call what wants more than a learning rate, or nothing where it should want something.
GIVEN: Mapping[str, Callable[[Any], Any]] = {
    "adafactor": lambda f: f(RATE, min_dim_size_to_factor=4),
    "adaptive_grad_clip": lambda f: f(0.01),
    "add_noise": lambda f: f(0.01, 0.55, key=jax.random.key(3)),
    "apply_if_finite": lambda f: f(_sgd(), 2),
    "chain": lambda f: f(optax.clip(1.0), _sgd()),
    "clip": lambda f: f(0.01),
    "clip_by_block_rms": lambda f: f(0.01),
    "clip_by_global_norm": lambda f: f(0.01),
    "conditionally_mask": lambda f: f(_sgd(), _every_other),
    "conditionally_transform": lambda f: f(_sgd(), _every_other),
    "ema": lambda f: f(0.9),
    "flatten": lambda f: f(optax.adam(RATE)),
    "freeze": lambda f: f(_MASK),
    "inject_hyperparams": _by_schedule,
    "inject_stateful_hyperparams": _by_schedule,
    "lookahead": lambda f: f(_sgd(), sync_period=2, slow_step_size=0.5),
    "masked": lambda f: f(optax.adam(RATE), _MASK),
    "multi_transform": _by_label,
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("sgd", _sgd())),
    "noisy_sgd": lambda f: f(RATE, key=jax.random.key(2)),
    "partition": _by_label,
    "scale": lambda f: f(-RATE),
    "scale_by_backtracking_linesearch": lambda f: f(5),
    "scale_by_schedule": lambda f: f(optax.cosine_decay_schedule(RATE, 10)),
    "scale_by_zoom_linesearch": lambda f: f(5),
    "selective_transform": lambda f: f(_sgd(), freeze_mask=_MASK),
    "snapshot": lambda f: f("norm", optax.tree.norm),
    "stateless": lambda f: f(lambda g, p: jax.tree.map(lambda g, p: -RATE * (g + p), g, p)),
    "stateless_with_tree_map": lambda f: f(lambda g, p: -RATE * (g + p)),
    "trace": lambda f: f(0.9),
    "with_extra_args_support": lambda f: f(_sgd()),
    "contrib.mechanize": lambda f: f(_sgd()),
    "contrib.sam": lambda f: f(_sgd(), optax.chain(optax.contrib.normalize(), _sgd())),
    "contrib.schedule_free": lambda f: f(_sgd(), RATE),
    "contrib.split_real_and_imaginary": lambda f: f(_sgd()),
}

# Not run as the others are: why.
EXCEPTIONS: Mapping[str, str] = {
    "lookahead": "keeps two copies of the parameters: has a test of its own",
    "measure_with_ema": "gives a number in place of updates: has a test of its own",
    "contrib.differentially_private_aggregate": "per-example gradients: has a test of its own",
    "contrib.scale_by_muon": "takes matrices alone: `contrib.muon` contains it",
    "contrib.dpsgd": "per-example gradients: has a test of its own",
}

# What `update` takes besides gradients, state and parameters.
EXTRA: Mapping[str, tuple[str, ...]] = {
    "lbfgs": ("value", "grad", "value_fn"),
    "polyak_sgd": ("value",),
    "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_polyak": ("value",),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
    "contrib.momo": ("value",),
    "contrib.momo_adam": ("value",),
    "contrib.reduce_on_plateau": ("value",),
    "contrib.sophia": ("obj_fn",),
}


def factories() -> dict[str, Callable[..., Any]]:
    """Every public factory by its name, those of `optax.contrib` with a prefix."""
    found: dict[str, Callable[..., Any]] = {}
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name in sorted(dir(module)):
            factory = getattr(module, name)
            if not name.startswith("_") and _makes_transformation(factory):
                found[prefix + name] = factory
    return found


def _makes_transformation(factory: Any) -> bool:
    if not callable(factory) or inspect.isclass(factory):
        return False
    try:
        returned = inspect.signature(factory).return_annotation
    except (TypeError, ValueError):
        return False
    return "GradientTransformation" in str(returned)


def names() -> list[str]:
    """The names of all factories that are run as the others are."""
    return [name for name in factories() if name not in EXCEPTIONS]


def make(name: str) -> Any:
    """The transformation that a factory makes."""
    factory = factories()[name]
    if name in GIVEN:
        made = GIVEN[name](factory)
    else:
        rate = inspect.signature(factory).parameters.get("learning_rate")
        wanted = rate is not None and rate.default is inspect.Parameter.empty
        made = factory(RATE) if wanted else factory()
    if "scale_by_" in name and "linesearch" not in name:
        made = optax.chain(made, optax.scale(-RATE))
    return made


def params() -> dict[str, dict[str, np.ndarray]]:
    """Two layers with a matrix and a vector each."""
    return {
        f"layer{i}": {"b": normal(WIDTH, seed=9 + i) / 2, "w": normal(WIDTH, WIDTH, seed=i) / 2}
        for i in range(2)
    }


def loss(params: Any, batch: Any) -> Any:
    """Mean square of two tanh layers, each in its scope."""
    x, y = batch
    for name, p in params.items():
        with jax.named_scope(name):
            x = jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean((x - y) ** 2)


def extra(name: str, batch: Any, value: Any, grads: Any) -> dict[str, Any]:
    """The further arguments of `update`."""

    def objective(params: Any) -> Any:
        return loss(params, batch)

    known = {"value": value, "grad": grads, "value_fn": objective, "obj_fn": objective}
    return {key: known[key] for key in EXTRA.get(name, ())}
