"""A byte-level GPT in Flax Linen, its text, and sampling from it with a cache of keys and values.

Nothing here names a device or a stage. The sharding constraints name the axes `data` and `model` of
whatever submesh a layer runs on; outside of a MultiMesh they are JAX's own and need a mesh.
"""

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from multimesh.jax import with_sharding_constraint

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `tied`: the table of the embedding also makes the logits."""

    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    context: int = 64
    tied: bool = True
    dropout: float = 0.0
    bf16: bool = False

    @property
    def dtype(self):
        """What the matrix products compute in; parameters and sums stay in float32."""
        return jnp.bfloat16 if self.bf16 else jnp.float32

    def dense(self, features, name, scale=1.0):
        """A dense layer without bias: `scale` shrinks its initial weights."""
        init = nn.initializers.variance_scaling(scale, "fan_in", "normal")
        return nn.Dense(features, use_bias=False, dtype=self.dtype, kernel_init=init, name=name)


class Attention(nn.Module):
    """Causal attention; with a cache, `x` stands at position `start` behind what is cached."""

    config: Config

    @nn.compact
    def __call__(self, x, cache, start):
        """x [batch, length, width] -> the same shape, and the cache with what is new."""
        config = self.config
        heads = (*x.shape[:2], config.num_heads, config.width // config.num_heads)

        def projected(name):
            y = config.dense(config.width, name)(x).reshape(heads)
            return with_sharding_constraint(y, P("data", None, "model", None))

        query, key, value = projected("query"), projected("key"), projected("value")
        if cache is not None:
            cache = {
                name: jax.lax.dynamic_update_slice_in_dim(cache[name], new, start, axis=1)
                for name, new in (("key", key), ("value", value))
            }
            key, value = cache["key"], cache["value"]
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32
        ) / math.sqrt(heads[-1])
        seen = start + jnp.arange(query.shape[1])[:, None] >= jnp.arange(key.shape[1])
        weights = nn.softmax(jnp.where(seen, scores, -1e9)).astype(config.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        return config.dense(config.width, "out", 0.5 / config.num_layers)(mixed), cache


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to the stream that passes through."""

    config: Config
    train: bool

    @nn.compact
    def __call__(self, x, cache, start):
        """x [batch, length, width] -> the same shape, and the new cache."""
        config = self.config
        drop = nn.Dropout(config.dropout, deterministic=not self.train)
        attention = Attention(config, name="attention")
        y, cache = attention(nn.LayerNorm(name="attention_norm")(x), cache, start)
        x = x + drop(y)
        hidden = config.dense(4 * config.width, "up")(nn.LayerNorm(name="mlp_norm")(x))
        hidden = nn.gelu(with_sharding_constraint(hidden, P("data", None, "model")))
        return x + drop(config.dense(config.width, "down", 0.5 / config.num_layers)(hidden)), cache


class GPT(nn.Module):
    """Embedding of bytes and positions, blocks, a norm, and logits."""

    config: Config
    train: bool = False

    @nn.compact
    def __call__(self, text, cache=None, start=0):
        """text int[batch, length] -> logits f32[batch, length, 256], and the new cache."""
        config = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(VOCABULARY, config.width, embedding_init=init, name="embed")
        position = nn.Embed(config.context, config.width, embedding_init=init, name="position")
        x = embed(text) + position(start + jnp.arange(text.shape[1]))
        x = with_sharding_constraint(x, P("data", None, None))
        new_cache = []
        for index in range(config.num_layers):
            block = Block(config, self.train, name=f"block_{index}")
            x, layer = block(x, None if cache is None else cache[index], start)
            new_cache.append(layer)
        x = nn.LayerNorm(name="final_norm")(x)
        head = embed.attend if config.tied else config.dense(VOCABULARY, "head")
        return head(x).astype(jnp.float32), new_cache


def init_params(config, key):
    """The parameters of the model, in float32."""
    return GPT(config).init(key, jnp.zeros((1, config.context), jnp.int32))["params"]


def loss_fn(config, params, text, dropout_key=None):
    """Mean cross entropy (nats a byte) of `text` int[batch, length + 1], byte after byte."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    model = GPT(config, train=dropout_key is not None)
    logits, _ = model.apply({"params": params}, text[:, :-1], rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def empty_cache(config, num_samples):
    """Keys and values of every layer, [samples, context, heads, width of a head]."""
    shape = (num_samples, config.context, config.num_heads, config.width // config.num_heads)
    return [
        {name: np.zeros(shape, config.dtype) for name in ("key", "value")}
        for _ in range(config.num_layers)
    ]


def make_generate(config, temperature=0.7):
    """A function (params, cache, prompt, key) -> (text, cache) that continues a prompt.

    The prompt goes through the model at once, then every new byte alone, up to the whole context.
    """
    model = GPT(config)

    def sample(logits, key, place):
        return jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)

    def generate(params, cache, prompt, key):
        length = prompt.shape[1]
        logits, cache = model.apply({"params": params}, prompt, cache)
        byte = sample(logits[:, -1], key, length)

        def append(carry, place):
            byte, cache = carry
            logits, cache = model.apply({"params": params}, byte[:, None], cache, place)
            new = sample(logits[:, -1], key, place + 1)
            return (new, cache), new

        places = jnp.arange(length, config.context - 1)
        (_, cache), rest = jax.lax.scan(append, (byte, cache), places)
        return jnp.concatenate([prompt, byte[:, None], rest.T], axis=1), cache

    return generate


class Text:
    """The sources of the Python standard library, as bytes; every tenth file is held out."""

    def __init__(self, seed=0):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        parts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
        self.held_out = np.concatenate(parts[::10])
        del parts[::10]
        self.training = np.concatenate(parts)
        self._draw = np.random.default_rng(seed)

    def batch(self, num_rows, length, held_out=False):
        """Rows int32[num_rows, length + 1] from random places."""
        text = self.held_out if held_out else self.training
        starts = self._draw.integers(len(text) - length, size=(num_rows, 1))
        return text[starts + np.arange(length + 1)].astype(np.int32)

    def bigram_entropy(self):
        """Nats a byte that even the best guess from one byte before costs."""
        pairs = self.training[:-1].astype(np.int64) * VOCABULARY + self.training[1:]
        counts = np.bincount(pairs, minlength=VOCABULARY**2).reshape(VOCABULARY, VOCABULARY)
        share = counts / counts.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            conditional = np.log(share / share.sum(1, keepdims=True))
        return float(-np.sum(share * np.where(share > 0, conditional, 0)))
