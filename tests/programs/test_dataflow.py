"""Dataflow of every form between tasks: skips, joins, towers, glue, several losses, and traffic.

Each program is trained for several steps (`training.train`); what crosses between submeshes is
compared with what has to.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh.jax import MultiMesh, Task, microbatch
from tests.programs.plainly import layer, normal, pipeline, sgd, weights
from tests.programs.training import arrays, check_once, crossings, stage_edges, train

WIDTH, ROWS, MICROBATCHES = 6, 2, 4
ACTIVATION = f"float32[{ROWS},{WIDTH}]"


def draw(*shape: int, seed: int) -> Any:
    return normal(*shape, seed=seed) / 2


def pairs(*shape: int) -> list[tuple[Any, Any]]:
    """Two batches of two arrays."""
    shape = (ROWS * MICROBATCHES, *(shape or (WIDTH,)))
    return [(normal(*shape, seed=40 + k), normal(*shape, seed=50 + k)) for k in range(2)]


def step_of(loss: Any, *, size: int = ROWS, aux: bool = False, schedule: Any = None) -> Any:
    """A step of gradient descent, over microbatches of `size` rows; 0 for none."""

    def step(params: Any, batch: Any) -> Any:
        grad = jax.value_and_grad(loss, has_aux=aux)
        if size:
            grad = microbatch(grad, 0, size, argnum=1, reduce="mean", schedule=schedule)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    return step


def edges(*pairs_of_stages: tuple[int, int]) -> dict[tuple[str, str], int]:
    """One activation a microbatch along each of these edges."""
    found: dict[tuple[str, str], int] = {}
    for a, b in pairs_of_stages:
        key = f"stage={a} -> stage={b}", ACTIVATION
        found[key] = found.get(key, 0) + MICROBATCHES
    return found


# --- skips ----------------------------------------------------------------------------------------

UNET = [draw(6, 8, seed=1), draw(4, 4, seed=2), draw(4, 4, seed=3), draw(8, 4, seed=4)]
UNET = [*UNET, draw(16, 6, seed=5)]


def unet(params: Any, batch: Any) -> Any:
    """Halves and doubles the features; each level is joined with the one that went down."""
    x, y = batch
    with layer(0):
        wide = jax.nn.relu(x @ params[0])
    with layer(1):
        narrow = jax.nn.relu(wide[:, ::2] @ params[1])
    with layer(2):
        bottom = jax.nn.relu(narrow @ params[2])
    with layer(3):
        up = jax.nn.relu(jnp.concatenate([bottom, narrow], 1) @ params[3])
    with layer(4):
        out = jnp.concatenate([jnp.repeat(up, 2, 1), wide], 1) @ params[4]
    return jnp.mean((out - y) ** 2)


def test_unet_on_five_stages():
    program = train(pipeline(5), step_of(unet, schedule="1f1b"), UNET, pairs(), key="unet")
    check_once(program)
    forward = [(a, b) for a, b in stage_edges(program) if a < b]
    assert forward == [(0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (3, 4)]


@pytest.mark.parametrize("size", [0, ROWS])
def test_unet_whose_sides_share_submeshes(size):
    def of_layer(name: str, backprop: bool) -> Task:
        stage = (0, 1, 2, 1, 0)[int(name.removeprefix("layer"))]
        return Task(name=name + "_bwd" * backprop, mesh_slice={"stage": stage})

    multi = MultiMesh(axis_sizes=(3,), axis_names=("stage",), devices=jax.devices()[:3])
    multi.register_task(r"layer\d+", callback=of_layer)
    key = "unet" if size else None
    check_once(train(multi, step_of(unet, size=size), UNET, pairs(), key))


def test_dense_skips_from_every_stage_to_every_later_one():
    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        seen = [x]
        for index, w in enumerate(params):
            with layer(index):
                seen.append(jnp.tanh(sum(seen) @ w))
        return jnp.mean((sum(seen) - y) ** 2)

    params = [draw(WIDTH, WIDTH, seed=index) for index in range(4)]
    check_once(train(pipeline(4), step_of(loss, schedule="1f1b"), params, pairs()))


# --- attention over another model -----------------------------------------------------------------


def attend(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2, -1) @ v


def encoder_decoder(params: Any, batch: Any) -> Any:
    """Two layers of each; every layer of the decoder reads what the encoder made at last."""
    memory, target = batch
    hidden = jnp.roll(target, 1, axis=1)
    for index, p in enumerate(params["encoder"]):
        with layer(index):
            memory = memory + attend(memory @ p[0], memory @ p[1], memory @ p[2])
    for index, p in enumerate(params["decoder"]):
        with layer(2 + index):
            hidden = hidden + attend(hidden @ p[0], hidden @ p[1], hidden @ p[2])
            hidden = hidden + attend(hidden @ p[3], memory @ p[4], memory @ p[5])
    return jnp.mean((hidden - target) ** 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_encoder_and_decoder_with_cross_attention(schedule):
    params = {
        "encoder": [[draw(WIDTH, WIDTH, seed=10 * i + j) / 2 for j in range(3)] for i in (1, 2)],
        "decoder": [[draw(WIDTH, WIDTH, seed=10 * i + j) / 2 for j in range(6)] for i in (6, 7)],
    }
    batches = [(m[:, :3], t) for m, t in pairs(5, WIDTH)]
    step = step_of(encoder_decoder, schedule=schedule)
    program = train(pipeline(4), step, params, batches, key="encoder-decoder")
    check_once(program)
    memory = f"float32[{ROWS},3,{WIDTH}]"
    found = {edge: n for (edge, type_), n in crossings(program).items() if type_ == memory}
    # the memory to both layers of the decoder; its gradients go straight back to where it was made
    there = [("0", "1"), ("1", "2"), ("1", "3"), ("3", "1"), ("2", "1"), ("1", "0")]
    assert found == {f"stage={a} -> stage={b}": MICROBATCHES for a, b in there}


# --- towers ---------------------------------------------------------------------------------------


def unit(x: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def test_two_towers_that_join_outside_their_scopes():
    """One unit vector a row crosses, and its gradient: all glue lies with the tower it is of."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        with layer(0):
            a = jnp.tanh(x @ params[0])
        a = unit(a)
        with layer(1):
            b = jnp.tanh(y @ params[1])
        b = unit(b)
        logits = a @ b.T
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.diag(logits))

    params = [draw(WIDTH, WIDTH, seed=index) for index in range(2)]
    program = train(pipeline(2), step_of(loss), params, pairs())
    assert arrays(program) == edges((0, 1), (1, 0))


def contrastive(params: Any, batch: Any) -> Any:
    """Two towers of two layers, with normalization, shared scales and a temperature outside."""
    x, y = batch
    with layer(0):
        a = jnp.tanh(x @ params["w"][0])
    a = unit(a) * params["scale"]
    with layer(1):
        a = jnp.tanh(a @ params["w"][1])
    with layer(2):
        b = jnp.tanh(y @ params["w"][2])
    b = unit(b) * params["scale"]
    with layer(3):
        b = jnp.tanh(b @ params["w"][3])
    logits = unit(a) @ unit(b).T * jnp.exp(params["temperature"])
    log_p = jax.nn.log_softmax(logits, -1) + jax.nn.log_softmax(logits, 0)
    return -jnp.mean(jnp.diag(log_p))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_towers_of_several_stages_run_beside_each_other(schedule):
    params = {
        "w": [draw(WIDTH, WIDTH, seed=index) for index in range(4)],
        "scale": normal(WIDTH, seed=9),
        "temperature": np.float32(0.5),
    }
    step = step_of(contrastive, schedule=schedule)
    program = train(pipeline(4), step, params, pairs(), key="contrastive")
    check_once(program)
    assert set(stage_edges(program)) == {
        (0, 1), (2, 3), (1, 3), (3, 1), (1, 0), (3, 2)
    }  # fmt: skip
    assert all(n <= MICROBATCHES for n in arrays(program).values())


@pytest.mark.parametrize("shared", ["normalized", "mask"])
def test_what_is_made_of_the_batch_ties_no_towers_together(shared):
    """Glue that both towers read is made by each from its own copy of the batch."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        ready = (x - x.mean(0)) / (x.std(0) + 1e-3)
        mask = jnp.where(y > 0, 1.0, 0.5)
        with layer(0):
            a = jnp.tanh(ready @ params[0])
        if shared == "mask":
            a, ready = a * mask, y * mask
        with layer(1):
            b = jnp.tanh(ready @ params[1])
        with layer(2):
            return jnp.mean(((a * b) @ params[2] - y) ** 2)

    params = [draw(WIDTH, WIDTH, seed=index) for index in range(3)]
    program = train(pipeline(3), step_of(loss, schedule="1f1b"), params, pairs())
    assert set(stage_edges(program)) == {(0, 2), (1, 2), (2, 0), (2, 1)}


def test_preparations_larger_than_what_they_save_are_sent():
    """Two columns of a wide batch cross, not the batch."""

    def loss(params: Any, batch: Any) -> Any:
        x, _ = batch
        few = jnp.tanh(x[:, :2])
        with layer(0):
            a = jnp.tanh(x @ params[0]) + few @ params[1]
        with layer(1):
            return jnp.mean((a @ params[2] + few @ params[1]) ** 2)

    params = [draw(WIDTH, WIDTH, seed=1), draw(2, WIDTH, seed=2), draw(WIDTH, WIDTH, seed=3)]
    program = train(pipeline(2), step_of(loss), params, pairs())
    sent = {type_ for edge, type_ in crossings(program) if edge == "stage=0 -> stage=1"}
    assert f"float32[{ROWS},2]" in sent
    assert f"float32[{MICROBATCHES},{ROWS},{WIDTH}]" not in sent


# --- glue between tasks ---------------------------------------------------------------------------


def normalize(x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("size", [0, ROWS])
def test_normalization_and_residual_stream_outside_the_scopes(size):
    """Only the stream and its gradient cross: the normalization follows the layer behind it."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for index, (w, scale) in enumerate(params):
            h = normalize(x) * scale
            with layer(index):
                h = jnp.tanh(h @ w)
            x = x + 0.5 * h
        return jnp.mean((normalize(x) - y) ** 2)

    params = [(draw(WIDTH, WIDTH, seed=i), normal(WIDTH, seed=20 + i)) for i in range(3)]
    program = train(pipeline(3), step_of(loss, size=size), params, pairs())
    found = arrays(program)
    if size:
        assert found == edges((0, 1), (1, 2), (2, 1), (1, 0))
        assert sum(task.num_runs > 1 for task in program.tasks) == 5, "glue is part of its layer"
    else:
        assert sum(found.values()) == 4


def test_one_value_conditions_every_stage():
    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        with layer(0):
            condition = jnp.tanh(y @ params["condition"])
        for index, w in enumerate(params["w"]):
            with layer(index):
                x = jnp.tanh(x @ w) * (1 + condition) + jnp.sin(condition)
        return jnp.mean((x - y) ** 2)

    w = [draw(WIDTH, WIDTH, seed=i) for i in range(4)]
    params = {"condition": draw(WIDTH, WIDTH, seed=9), "w": w}
    program = train(pipeline(4), step_of(loss, schedule="1f1b"), params, pairs())
    check_once(program)
    forward = [(0, 1), (0, 1), (1, 2), (2, 3), (0, 2), (0, 3)]
    backward = [(3, 2), (2, 1), (1, 0), (1, 0), (2, 0), (3, 0)]
    found = {key: n for key, n in arrays(program).items() if key[1] == ACTIVATION}
    assert found == edges(*forward, *backward)


# --- several losses and metrics -------------------------------------------------------------------


def experts(params: Any, batch: Any) -> Any:
    """A mixture of three experts in every layer; each has an auxiliary loss and a metric."""
    x, y = batch
    auxiliary, loads = [], {}
    for index, p in enumerate(params):
        with layer(index):
            gate = jax.nn.softmax(x @ p["gate"], -1)
            weight, chosen = jax.lax.top_k(gate, 2)
            outs = jnp.einsum("bd,edf->bef", x, p["experts"])
            outs = jnp.take_along_axis(outs, chosen[:, :, None], 1)
            x = x + jnp.tanh((outs * weight[:, :, None]).sum(1))
            load = jax.nn.one_hot(chosen[:, 0], 3).mean(0)
            auxiliary.append(3 * jnp.sum(load * gate.mean(0)))
            loads[f"load{index}"] = load
    main, aux = jnp.mean((x - y) ** 2), sum(auxiliary) / len(auxiliary)
    return main + 0.01 * aux, {"main": main, "aux": aux, **loads}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_experts_with_an_auxiliary_loss_on_every_stage(schedule):
    params = [
        {"gate": draw(WIDTH, 3, seed=i), "experts": draw(3, WIDTH, WIDTH, seed=10 + i)}
        for i in range(3)
    ]
    step = step_of(experts, aux=True, schedule=schedule)
    program = train(pipeline(3), step, params, pairs(), key="experts")
    check_once(program)
    assert arrays(program) == edges((0, 1), (1, 2), (2, 1), (1, 0))
    forward = {(a, b) for a, b in stage_edges(program) if a < b}
    assert forward == {(0, 1), (1, 2), (0, 2)}, "auxiliary losses go straight to the last stage"


def test_heads_of_several_tasks():
    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        with layer(0):
            trunk = jnp.tanh(x @ params[0])
        outs = []
        for index in (1, 2, 3):
            with layer(index):
                outs.append(trunk @ params[index])
        losses = [jnp.mean((out - y) ** 2) for out in outs]
        accuracy = jnp.mean((outs[0] > 0) == (y > 0))
        total = sum(w * one for w, one in zip((0.5, 0.3, 0.2), losses, strict=True))
        return total, {"losses": losses, "accuracy": accuracy}

    params = [draw(WIDTH, WIDTH, seed=i) for i in range(4)]
    step = step_of(loss, aux=True, schedule="1f1b")
    program = train(pipeline(4), step, params, pairs())
    check_once(program)
    assert sum(n for (_, type_), n in arrays(program).items() if type_ == ACTIVATION) == 24


def test_two_losses_with_gradients_of_their_own():
    """A generator and a discriminator, each trained against the other, in one loop."""

    def generate(params: Any, z: Any) -> Any:
        with layer(0):
            h = jnp.tanh(z @ params[0])
        with layer(1):
            return h @ params[1]

    def judge(params: Any, x: Any) -> Any:
        with layer(2):
            h = jnp.tanh(x @ params[0])
        with layer(3):
            return (h @ params[1]).mean(-1)

    def both(params: Any, batch: Any) -> Any:
        z, real = batch
        maker, critic = params

        def of_critic(critic: Any) -> Any:
            fake = judge(critic, jax.lax.stop_gradient(generate(maker, z)))
            return jnp.mean(jax.nn.softplus(-judge(critic, real)) + jax.nn.softplus(fake))

        def of_maker(maker: Any) -> Any:
            return jnp.mean(jax.nn.softplus(-judge(critic, generate(maker, z))))

        (one, critic_grads), (two, maker_grads) = (
            jax.value_and_grad(of_critic)(critic),
            jax.value_and_grad(of_maker)(maker),
        )
        return {"critic": one, "maker": two}, (maker_grads, critic_grads)

    def step(params: Any, batch: Any) -> Any:
        run = microbatch(both, 0, ROWS, argnum=1, reduce="mean", schedule="1f1b")
        losses, grads = run(params, batch)
        return sgd(params, grads), losses

    params = (weights(2, WIDTH), weights(2, WIDTH))
    check_once(train(pipeline(4), step, params, pairs()))


def test_metrics_of_every_kind_from_every_stage():
    """Integers, booleans, maxima, histograms and means, reduced each in its own way."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        metrics: dict[str, Any] = {"sum": {}, "max": {}, "stack": {}}
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w)
            metrics["sum"][f"positive{index}"] = jnp.sum(x > 0)
            metrics["max"][f"largest{index}"] = jnp.max(jnp.abs(x))
            metrics["stack"][f"mean{index}"] = x.mean(0)
        metrics["max"]["wrong"] = jnp.any(jnp.isnan(x))
        return jnp.mean((x - y) ** 2), metrics

    def step(params: Any, batch: Any) -> Any:
        kinds = {"sum": "sum", "max": "max", "stack": "stack"}
        run = microbatch(
            jax.value_and_grad(loss, has_aux=True),
            0,
            ROWS,
            argnum=1,
            reduce=(("mean", kinds), "mean"),
        )
        (value, metrics), grads = run(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        share = metrics["sum"]["positive0"] / metrics["sum"]["positive1"]
        return sgd(params, grads), {"loss": value, "norm": norm, "share": share, **metrics}

    params = [draw(WIDTH, WIDTH, seed=i) for i in range(3)]
    check_once(train(pipeline(3), step, params, pairs()))
