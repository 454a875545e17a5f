"""The operations that random programs are made of.

Each takes activations `x: [batch, WIDTH]` and gives activations of that shape. `shapes` are those
of its parameters, in units where 0 stands for WIDTH. Values stay near 1, so that several layers
and steps keep the references well conditioned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array
NUM_TOKENS = 6
NUM_SCANNED = 2


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer can read besides activations and parameters."""

    tokens: Array  # [batch] int32, below NUM_TOKENS
    key: Array  # typed key, already folded with the layer's number
    constrain_weight: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: its parameters' shapes (0 = WIDTH) and its function."""

    shapes: tuple[tuple[int, ...], ...]
    fun: Callable[..., Array]  # (x, inputs, *parameters) -> x


@jax.custom_vjp
def _scaled_sine(x: Array) -> Array:
    return jnp.sin(x) * 1.5


def _scaled_sine_backward(x: Array, g: Array) -> tuple[Array]:
    return (g * jnp.cos(x) * 1.5,)


_scaled_sine.defvjp(lambda x: (_scaled_sine(x), x), _scaled_sine_backward)


def _matmul(x: Array, inputs: Inputs, w: Array) -> Array:
    return x @ inputs.constrain_weight(w)


def _mlp(x: Array, inputs: Inputs, w: Array, b: Array, v: Array) -> Array:
    return x + jax.nn.gelu(x @ inputs.constrain_weight(w) + b) @ v


def _norm(x: Array, inputs: Inputs, scale: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 0.1) * (1 + scale)


def _attend(x: Array, inputs: Inputs, w: Array) -> Array:
    heads = (x @ w).reshape(x.shape[0], 2, -1)
    weights = jax.nn.softmax(jnp.einsum("bhd,bkd->bhk", heads, heads))
    return x + jnp.einsum("bhk,bkd->bhd", weights, heads).reshape(x.shape)


def _embed(x: Array, inputs: Inputs, table: Array) -> Array:
    return x + table[inputs.tokens]


def _one_hot(x: Array, inputs: Inputs, table: Array) -> Array:
    return x + jax.nn.one_hot(inputs.tokens, table.shape[0], dtype=x.dtype) @ table


def _dropout(x: Array, inputs: Inputs) -> Array:
    keep = jax.random.bernoulli(inputs.key, 0.75, x.shape)
    return jnp.where(keep, x * jnp.asarray(4 / 3, x.dtype), 0)


def _scanned(x: Array, inputs: Inputs, ws: Array) -> Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, ws)[0]


def _mixed(x: Array, inputs: Inputs) -> Array:
    turned = x.reshape(-1, 2, x.shape[1] // 2).swapaxes(1, 2).reshape(x.shape)
    return jnp.concatenate([turned[:, 2:], x[:, :2]], axis=1)


def _nested_jit(x: Array, inputs: Inputs, w: Array) -> Array:
    return jax.jit(lambda x, w: jnp.tanh(x * (1 + w)))(x, w)


def _conditional(x: Array, inputs: Inputs, w: Array) -> Array:
    return jax.lax.cond(inputs.tokens[0] % 2 == 0, lambda: x * (1 + w), lambda: x + w)


def _picked(x: Array, inputs: Inputs) -> Array:
    columns = jnp.argsort(inputs.tokens[0] * 3 % jnp.arange(1, x.shape[1] + 1))
    return x + 0.5 * jnp.take_along_axis(x, columns[None, :], axis=1)


OPS: dict[str, Op] = {
    "matmul": Op(((0, 0),), _matmul),
    "bias": Op(((0,),), lambda x, inputs, b: x + b),
    "tanh": Op((), lambda x, inputs: jnp.tanh(x)),
    "relu": Op((), lambda x, inputs: jax.nn.relu(x)),  # custom_jvp
    "sine": Op((), lambda x, inputs: _scaled_sine(x)),  # custom_vjp
    "softmax": Op((), lambda x, inputs: x + jax.nn.softmax(x)),
    "center": Op((), lambda x, inputs: x - 0.5 * x.mean(-1, keepdims=True)),
    "batch mean": Op((), lambda x, inputs: x - 0.5 * x.mean(0)),
    "cumsum": Op((), lambda x, inputs: 0.25 * jnp.cumsum(x, axis=-1)),
    "maximum": Op((), lambda x, inputs: x - 0.5 * x.max(-1, keepdims=True)),
    "stop": Op((), lambda x, inputs: x + 0.5 * jax.lax.stop_gradient(x)),
    "mlp": Op(((0, 0), (0,), (0, 0)), _mlp),
    "norm": Op(((0,),), _norm),
    "attend": Op(((0, 0),), _attend),
    "embed": Op(((NUM_TOKENS, 0),), _embed),  # gather, and scatter-add in its gradient
    "one hot": Op(((NUM_TOKENS, 0),), _one_hot),
    "dropout": Op((), _dropout),
    "scanned": Op(((NUM_SCANNED, 0, 0),), _scanned),
    "mixed": Op((), _mixed),
    "nested jit": Op(((0,),), _nested_jit),
    "conditional": Op(((0,),), _conditional),
    "picked": Op((), _picked),
}


def apply(name: str, x: Array, inputs: Inputs, parameters: Any) -> Array:
    """Applies the operation `name`."""
    return OPS[name].fun(x, inputs, *parameters)
