"""Builds the program of a `Spec` as an ordinary JAX function, with its state and batches.

The function is written once; what differs between ours and the references (how a batch is cut
into microbatches, what a sharding constraint does) is passed in as `Surroundings`.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from tests.programs.ops import NUM_TOKENS, OPS, Array, Inputs, apply
from tests.programs.spec import WIDTH, Layer, Spec

Tree: TypeAlias = Any

MICROBATCH_SIZE = 4  # divides by every data axis
NUM_STEPS_DRAWN = 5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What ours and the references do in their own ways.

    `microbatch(fun, reduce, schedule)` runs `fun(params, batch, key)` per slice of the batch;
    `constrain(x, spec)` lays out a value.
    """

    microbatch: Callable[[Callable[..., Tree], Tree, str], Callable[..., Tree]]
    constrain: Callable[[Array, P], Array]


def plain(mesh: Mesh | None) -> Surroundings:
    """The surroundings of the references: a scan written out, constraints on `mesh` if any."""

    def constrain(x: Array, spec: P) -> Array:
        if mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return Surroundings(_plain_microbatch, constrain)


def _plain_microbatch(fun: Callable[..., Tree], reduce: Tree, schedule: str) -> Callable[..., Tree]:
    """Accumulates from zero in ascending order; `reduce` is a prefix of "sum", "mean", "stack"."""

    def run(params: Tree, batch: Tree, key: Array) -> Tree:
        slices = jax.tree.map(lambda x: x.reshape(-1, MICROBATCH_SIZE, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], slices)
        shapes = jax.eval_shape(fun, params, first, key)
        how = jax.tree.broadcast(reduce, shapes)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        is_sum = jax.tree.map(lambda r: r in ("sum", "mean"), how)

        def step(total: Tree, piece: Tree) -> tuple[Tree, Tree]:
            result = fun(params, piece, key)
            total = jax.tree.map(lambda s, t, r: t + r if s else t, is_sum, total, result)
            return total, jax.tree.map(lambda s, r: None if s else r, is_sum, result)

        total, stacked = jax.lax.scan(step, zeros, slices)
        num = jax.tree.leaves(slices)[0].shape[0]
        stacked = jax.tree.leaves(stacked, is_leaf=lambda x: x is None)
        ends = [
            s if r == "stack" else t / num if r == "mean" else t
            for r, t, s in zip(jax.tree.leaves(how), jax.tree.leaves(total), stacked, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(total), ends)

    return run


def make_state(spec: Spec) -> Tree:
    """The first state: parameters, optimizer state and key, on the host."""
    draw = np.random.default_rng(spec.data_seed)
    params = {
        f"layer{index}": [
            [_parameter(draw, shape, spec.dtype) for shape in OPS[op].shapes] for op in layer.ops
        ]
        for index, layer in enumerate(spec.layers)
        if layer.tied < 0
    }
    if spec.scanned:
        params = {"layers": jax.tree.map(lambda *xs: np.stack(xs), *params.values())}
    state = {"params": params, "key": jax.random.key(spec.data_seed)}
    if not spec.forward_only:
        state["opt"] = jax.tree.map(np.asarray, _optimizer(spec).init(params))
    return state


def make_batches(spec: Spec) -> list[Tree]:
    """One batch for each of five steps, on the host."""
    draw = np.random.default_rng(spec.data_seed + 1)
    rows = MICROBATCH_SIZE * max(1, spec.num_microbatches)

    def batch() -> Tree:
        return {
            "x": _rounded(draw.standard_normal((rows, WIDTH)), spec.dtype),
            "tokens": draw.integers(0, NUM_TOKENS, rows).astype(np.int32),
            "target": _rounded(draw.standard_normal((rows, WIDTH)), spec.dtype),
            "label": draw.integers(0, WIDTH, rows).astype(np.int32),
        }

    return [batch() for _ in range(NUM_STEPS_DRAWN)]


def make_step(spec: Spec, around: Surroundings) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    """The program: `step(state, batch) -> (state, results)`."""

    def model(params: Tree, batch: Tree, key: Array) -> Array:
        return _model(spec, around, params, batch, key)

    model = jax.checkpoint(model) if spec.checkpoint else model

    def loss_fn(params: Tree, batch: Tree, key: Array) -> Tree:
        y = model(params, batch, key)
        loss = _loss(spec, y, batch)
        if not spec.aux:
            return loss
        count = (batch["tokens"] > 2).sum()
        return loss, {"mean": y.mean(0), "count": count, "bits": jax.random.bits(key, (3,))}

    def train(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        key, sub = jax.random.split(state["key"])
        grad = jax.value_and_grad(loss_fn, has_aux=spec.aux)
        if spec.num_microbatches:
            reduce = ((spec.reduce, "stack"), spec.reduce) if spec.aux else spec.reduce
            grad = around.microbatch(grad, reduce, spec.schedule)
        results, grads = grad(state["params"], batch, sub)
        updates, opt = _optimizer(spec).update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        if spec.second_loop:
            evaluate = around.microbatch(loss_fn, "mean", "")
            results = results, jax.tree.leaves(evaluate(params, batch, sub))[0]
        return {"params": params, "opt": opt, "key": key}, results

    def forward(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        key, sub = jax.random.split(state["key"])
        return {**state, "key": key}, model(state["params"], batch, sub)

    return forward if spec.forward_only else train


def _model(spec: Spec, around: Surroundings, params: Tree, batch: Tree, key: Array) -> Array:
    x = _constrained(spec, around, batch["x"], P("data", None))
    if spec.scanned:
        x = _scan(spec, around, params["layers"], x, batch, key)
        return _constrained(spec, around, x, P("data", None))

    def run(index: int, x: Array, outputs: list[Array]) -> Array:
        layer = spec.layers[index]
        weights = params[f"layer{_owner(spec, index)}"]
        inputs = _inputs(spec, around, batch, jax.random.fold_in(key, index))
        scope = jax.named_scope(f"layer{index}") if layer.scoped else contextlib.nullcontext()
        with scope:
            x = _layer(layer, x, weights, inputs)
            return x + 0.5 * outputs[layer.skip] if layer.skip >= 0 else x

    def two(index: int, outputs: list[Array], x: Array) -> Array:
        first = run(index, x, outputs)
        return run(index + 1, first, [*outputs, first])

    outputs: list[Array] = []
    while len(outputs) < len(spec.layers):
        index = len(outputs)
        if index == spec.gated and index + 1 < len(spec.layers):
            both = functools.partial(two, index, outputs)
            x = jax.lax.cond(batch["tokens"][0] % 2 == 0, both, lambda x: x, x)
            outputs += [x, x]
        else:
            x = run(index, x, outputs)
            outputs.append(x)
    return _constrained(spec, around, x, P("data", None))


def _scan(
    spec: Spec, around: Surroundings, stacks: Tree, x: Array, batch: Tree, key: Array
) -> Array:
    """All layers as one scan over their stacked parameters; iteration i is `layer_<i>`."""

    def step(x: Array, piece: Tree) -> tuple[Array, None]:
        weights, index = piece
        inputs = _inputs(spec, around, batch, jax.random.fold_in(key, index))
        with jax.named_scope("layer"):
            return _layer(spec.layers[0], x, weights, inputs), None

    return jax.lax.scan(step, x, (stacks, jnp.arange(len(spec.layers))))[0]


def _inputs(spec: Spec, around: Surroundings, batch: Tree, key: Array) -> Inputs:
    return Inputs(
        tokens=batch["tokens"],
        key=key,
        constrain_weight=lambda w: _constrained(spec, around, w, P(None, "model")),
    )


def _layer(layer: Layer, x: Array, weights: Tree, inputs: Inputs) -> Array:
    def run(x: Array, weights: Tree) -> Array:
        for op, parameters in zip(layer.ops, weights, strict=True):
            x = apply(op, x, inputs, parameters)
        return x

    return (jax.checkpoint(run) if layer.checkpoint else run)(x, weights)


def _owner(spec: Spec, index: int) -> int:
    """The layer that holds the parameters of layer `index`."""
    while spec.layers[index].tied >= 0:
        index = spec.layers[index].tied
    return index


def _loss(spec: Spec, y: Array, batch: Tree) -> Array:
    if spec.loss == "square":
        return jnp.square(y - batch["target"]).mean()
    return optax.softmax_cross_entropy_with_integer_labels(y, batch["label"]).mean()


def _constrained(spec: Spec, around: Surroundings, x: Array, dims: P) -> Array:
    return around.constrain(x, dims) if spec.constrained else x


def _optimizer(spec: Spec) -> optax.GradientTransformation:
    # A large eps: adam divides by it where a gradient is all rounding error.
    adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), eps=1e-2, weight_decay=1e-2)
    match spec.optimizer:
        case "sgd":
            return optax.sgd(0.05)
        case "momentum":
            return optax.sgd(0.05, momentum=0.9)
        case "adamw":
            return adamw
        case "clipped adamw":
            return optax.chain(optax.clip_by_global_norm(0.5), adamw)
        case "guarded adamw":
            return optax.apply_if_finite(adamw, 3)
        case "two steps":
            return optax.MultiSteps(adamw, 2).gradient_transformation()
    raise AssertionError(spec.optimizer)


def _parameter(draw: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    sizes = tuple(size or WIDTH for size in shape)
    return _rounded(0.6 * draw.standard_normal(sizes) / np.sqrt(sizes[-1]) * 2, dtype)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(values).astype(jnp.dtype(dtype))
