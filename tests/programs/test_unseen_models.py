"""Whole models that this project was not built with: a diffusion U-Net, and a two-tower retriever.

Both are ordinary Flax and optax, pipelined by scopes in a few lines. They train as plain `jax.jit`
trains them (R1), and `explain()` tells a stranger what happened to them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from multimesh.jax import MultiMesh, Task, microbatch, mjit
from tests import oracle

NUM_STEPS = 5


def check_steps(
    ours: Callable[..., Any], step: Callable[..., Any], state: Any, batches: Any, width: int
) -> None:
    """Compares five steps of `state, out = step(state, batch)` with the references and the oracle.

    After the first and after the last step all of the state and the output are within bounds.
    """
    meshes = [Mesh(np.array(jax.devices()[:n]), ("data",)) for n in (1, width)]
    plain = jax.jit(step)
    exact_step = oracle.Oracle(step, state, batches[0])
    states, exact, mine = [state, state], state, jax.tree.map(jnp.array, state)
    for number, batch in enumerate(batches):
        results = []
        for mesh, theirs in zip(meshes, states, strict=True):
            placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
            results.append(plain(jax.device_put(theirs, NamedSharding(mesh, P())), placed))
        states = [theirs for theirs, _ in results]
        exact, exact_out = exact_step(exact, batch)
        mine, out = ours(mine, batch)
        if number in (0, NUM_STEPS - 1):
            oracle.compare((mine, out), *results, (exact, exact_out)).check()


def stages_of(where: dict[str, int], width: int, schedule: Any = None) -> MultiMesh:
    """A MultiMesh whose stages have `width` devices; each scope of `where` runs on its stage."""
    num_stages = max(where.values()) + 1
    devices = np.array(jax.devices()[: num_stages * width]).reshape(num_stages, width)
    multi_mesh = MultiMesh(global_mesh=Mesh(devices, ("stage", "data")), schedule=schedule)
    for name, stage in where.items():
        multi_mesh.register_task(rf"\b{name}\b", task=Task(name, mesh_slice={"stage": stage}))
    return multi_mesh


# --- a diffusion U-Net ----------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions with the embedding of the time between them, around them a shortcut."""

    features: int

    @nn.compact
    def __call__(self, x, embedding):
        h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=2)(x)))
        h = h + nn.Dense(self.features)(nn.swish(embedding))[:, None, None]
        h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(num_groups=2)(h)))
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1))(x)
        return x + h


class UNet(nn.Module):
    """Predicts the noise; what goes down is concatenated to what comes up, stages further on."""

    width: int = 4

    @nn.compact
    def __call__(self, x, time):
        frequencies = jnp.exp(-jnp.arange(self.width // 2, dtype=jnp.float32))
        angles = time[:, None] * frequencies
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        embedding = nn.Dense(8, name="time")(waves)
        h = nn.Conv(self.width, (3, 3), name="conv_in")(x)
        skip = Block(self.width, name="down")(h, embedding)
        h = nn.avg_pool(skip, (2, 2), (2, 2))
        h = Block(2 * self.width, name="middle")(h, embedding)
        h = jax.image.resize(h, (*skip.shape[:3], h.shape[-1]), "nearest")
        h = Block(self.width, name="up")(jnp.concatenate([h, skip], -1), embedding)
        return nn.Conv(x.shape[-1], (3, 3), name="conv_out")(nn.swish(h))


SIZE, ROWS, MICROBATCH = 8, 8, 4
U_NET_STAGES = {"conv_in": 0, "time": 0, "down": 0, "middle": 1, "up": 2, "conv_out": 2}
momentum = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9))


def diffusion_loss(params, batch):
    image, time, noise = batch["image"], batch["time"], batch["noise"]
    signal = jnp.cos(time * jnp.pi / 2)[:, None, None, None]
    noisy = signal * image + jnp.sqrt(1 - signal**2) * noise
    return jnp.mean(jnp.square(UNet().apply(params, noisy, time) - noise))


def diffusion_step(state, batch):
    params, opt = state
    gradient = microbatch(
        jax.value_and_grad(diffusion_loss), 0, MICROBATCH, argnum=1, reduce="mean"
    )
    loss, grads = gradient(params, batch)
    updates, opt = momentum.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), loss


def images(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)
    shape = (ROWS, SIZE, SIZE, 3)
    return {
        "image": rng.randn(*shape).astype(np.float32),
        "noise": rng.randn(*shape).astype(np.float32),
        "time": rng.uniform(0.1, 0.9, ROWS).astype(np.float32),
    }


@pytest.fixture(scope="module")
def diffusion():
    """The compiled step of the U-Net on three stages of two devices, and its state."""
    batch = images(0)
    params = UNet().init(jax.random.key(0), batch["image"], batch["time"])
    state = jax.tree.map(np.asarray, (params, momentum.init(params)))
    with stages_of(U_NET_STAGES, width=2, schedule="1f1b"):
        step = mjit(diffusion_step, donate_argnums=0, in_shardings=(None, P("data")))
    return step, state


def test_a_u_net_trains_as_under_plain_jit(diffusion):
    step, state = diffusion
    check_steps(step, diffusion_step, state, [images(n) for n in range(NUM_STEPS)], width=2)


def test_a_u_net_explained(diffusion):
    step, state = diffusion
    report = step.lower(state, images(0)).explain()
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    moves = {
        (r.why, r.edge, r.made and r.made.scope.split("/")[-1]) for r in report.reshards if r.bytes
    }
    skip = ("value", "stage=0 -> stage=2", "down")
    embedding = ("value", "stage=0 -> stage=1", "time")
    assert {skip, embedding, ("value", "stage=0 -> stage=2", "time")} <= moves
    assert ("argument", "stage=0 -> stage=2", None) in moves, "the noise is read by the loss too"
    assert "`batch['noise']` (stage=0 -> stage=2)" in " ".join(text.split())
    sizes = {(r.why, r.edge): r.type for r in report.reshards if r.made and "UNet" in r.made.scope}
    assert sizes["value", "stage=1 -> stage=2"] == "float32[4,4,4,8]", "sent before it is resized"
    assert sizes["gradient", "stage=2 -> stage=0"], "of the skip, on no way round"
    assert report.idle == report.unused_axes == ()
    assert [r.matched for r in report.registrations] == [(name,) for name in U_NET_STAGES]
    lines = {line.rsplit(":", 1)[0] for code in report.code for line in code.lines}
    assert lines == {__file__}, "no line of Flax or optax"
    assert {s.residual_sets for s in report.submeshes} == {1, 2}


# --- two towers and a softmax over the batch -----------------------------------------------------


class Tower(nn.Module):
    """Embeds a bag of ids and dense features as a unit vector."""

    vocabulary: int

    @nn.compact
    def __call__(self, ids, dense):
        bag = nn.Embed(self.vocabulary, 8, name="embed")(ids).mean(1)
        h = nn.relu(nn.Dense(16)(jnp.concatenate([bag, dense], -1)))
        h = nn.Dense(8)(h)
        return h / jnp.sqrt(jnp.sum(h * h, axis=-1, keepdims=True) + 1e-6)


class TwoTowers(nn.Module):
    """Scores every user of a batch against every item."""

    @nn.compact
    def __call__(self, batch):
        users = Tower(20, name="user")(batch["user_ids"], batch["user_dense"])
        items = Tower(30, name="item")(batch["item_ids"], batch["item_dense"])
        scale = self.param("scale", nn.initializers.constant(5.0), ())
        return scale * users @ items.T


adagrad = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.05))


def retrieval_loss(params, batch):
    logits = TwoTowers().apply(params, batch) - jnp.log(batch["frequency"])
    labels = jnp.arange(logits.shape[0])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).sum()


def retrieval_step(state, batch):
    params, opt = state
    (loss, hits), grads = jax.value_and_grad(retrieval_loss, has_aux=True)(params, batch)
    updates, opt = adagrad.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": loss, "hits": hits}


def pairs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(seed)
    return {
        "user_ids": rng.randint(0, 20, (ROWS, 5)).astype(np.int32),
        "item_ids": rng.randint(0, 30, (ROWS, 3)).astype(np.int32),
        "user_dense": rng.randn(ROWS, 4).astype(np.float32),
        "item_dense": rng.randn(ROWS, 4).astype(np.float32),
        "frequency": rng.uniform(0.1, 1.0, ROWS).astype(np.float32),
    }


@pytest.fixture(scope="module")
def retrieval():
    """The compiled step of the two towers, each on two devices, and its state."""
    params = TwoTowers().init(jax.random.key(0), pairs(0))
    state = jax.tree.map(np.asarray, (params, adagrad.init(params)))
    with stages_of({"user": 0, "item": 1}, width=2):
        step = mjit(retrieval_step, donate_argnums=0, in_shardings=(None, P("data")))
    return step, state


def test_two_towers_train_as_under_plain_jit(retrieval):
    step, state = retrieval
    check_steps(step, retrieval_step, state, [pairs(n) for n in range(NUM_STEPS)], width=2)


def test_two_towers_explained(retrieval):
    step, state = retrieval
    report = step.lower(state, pairs(0)).explain()
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    homes = {a.name: a.home for a in report.arguments if a.bytes > 4}
    assert {home for name, home in homes.items() if "'user" in name} == {"stage=0"}
    assert {home for name, home in homes.items() if "'item" in name} == {"stage=1"}
    moved = [r for r in report.reshards if r.type == "float32[8,8]"]
    assert {(r.why, r.edge) for r in moved} == {
        ("value", "stage=0 -> stage=1"),
        ("gradient", "stage=1 -> stage=0"),
    }, "one tower's vectors and their gradients cross, and no logits"
    assert "result[1]['hits'], result[1]['loss']" in " ".join(text.split()).replace("\n", " ")
    assert len(moved) == 2, "the scaled vectors are not sent beside the vectors"
    assert report.loops == ()
