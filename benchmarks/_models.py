"""The models of the benchmarks: an MLP of tanh layers and a GPT, in plain JAX and of any size.

Parameters are lists of layers; layer `i` runs in the scope `layer<i>`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Model:
    """A model: parameters of one layer, and the layer.

    Attributes:
        init: (random numbers, width) -> the parameters of one layer.
        apply: (parameters of one layer, activations) -> activations of the same shape.
        row: The shape of one row of activations, by width.
    """

    init: Callable[[np.random.Generator, int], Any]
    apply: Callable[[Any, Any], Any]
    row: Callable[[int], tuple[int, ...]]

    def params(self, num_layers: int, width: int) -> list[Any]:
        """Parameters of all layers, on the host."""
        draw = np.random.default_rng(0)
        return [self.init(draw, width) for _ in range(num_layers)]

    def batch(self, num_rows: int, width: int) -> np.ndarray:
        """Random rows of activations, on the host."""
        shape = (num_rows, *self.row(width))
        return np.random.default_rng(1).standard_normal(shape, np.float32)

    def loss(self, params: Sequence[Any], x: Any) -> Any:
        """Mean square of the last activations."""
        for index, layer in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = self.apply(layer, x)
        return jnp.square(x).mean()


# --- tanh layers ----------------------------------------------------------------------------------


def _init_tanh(draw: np.random.Generator, width: int) -> Any:
    return draw.standard_normal((width, width), np.float32) / np.float32(np.sqrt(width))


MLP = Model(_init_tanh, lambda w, x: jnp.tanh(x @ w), lambda width: (width,))


# --- blocks of a GPT ------------------------------------------------------------------------------

CONTEXT = 4
NUM_HEADS = 2
BLOCK = {
    "norm1": ("scale", "bias"),
    "qkv": ("kernel", "bias"),
    "out": ("kernel", "bias"),
    "norm2": ("scale", "bias"),
    "up": ("kernel", "bias"),
    "down": ("kernel", "bias"),
}


def _init_block(draw: np.random.Generator, width: int) -> dict[str, dict[str, np.ndarray]]:
    sizes = {"qkv": (width, 3 * width), "out": (width, width)}
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}

    def array(part: str, name: str) -> np.ndarray:
        if name == "kernel":
            return draw.standard_normal(sizes[part], np.float32) / np.float32(np.sqrt(width))
        size = sizes[part][1] if part in sizes else width
        return np.full(size, name == "scale", np.float32)

    return {part: {name: array(part, name) for name in names} for part, names in BLOCK.items()}


def _norm(params: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return x * scale * params["scale"] + params["bias"]


def _dense(params: Any, x: Any) -> Any:
    return x @ params["kernel"] + params["bias"]


def _attend(params: Any, x: Any) -> Any:
    heads = (*x.shape[:2], NUM_HEADS, x.shape[2] // NUM_HEADS)
    query, key, value = (
        part.reshape(heads) for part in jnp.split(_dense(params["qkv"], x), 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(heads[-1])
    seen = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    return _dense(params["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


def _apply_block(params: Any, x: Any) -> Any:
    x = x + _attend(params, _norm(params["norm1"], x))
    hidden = jax.nn.gelu(_dense(params["up"], _norm(params["norm2"], x)))
    return x + _dense(params["down"], hidden)


GPT = Model(_init_block, _apply_block, lambda width: (CONTEXT, width))
