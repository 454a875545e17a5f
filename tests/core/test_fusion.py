"""The settings of fusion decide how many programs run, never what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, enable_task_fusion, microbatch, mjit
from tests.oracle import Oracle, compare, reference_a

NUM_LAYERS = 3
NUM_MICROBATCHES = 4


def loss(params, x):
    for index, w in enumerate(params):
        with jax.named_scope(f"layer{index}"):
            x = jnp.tanh(x @ w)
    return jnp.square(x).mean()


def step(params, x):
    gradient = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1, schedule="1f1b", reduce="mean")
    value, grads = gradient(params, x)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


@pytest.mark.parametrize(
    ("fusion", "num_runs"),
    [("auto", 1), ("never", 2 * NUM_LAYERS * NUM_MICROBATCHES)],
)
def test_layers_of_one_submesh_are_one_loop_or_tasks_of_their_own(fusion, num_runs):
    """On one submesh the whole loop is one program, unless tasks are never to be fused."""
    draw = np.random.default_rng(0)
    params = [draw.standard_normal((8, 8), np.float32) / 3 for _ in range(NUM_LAYERS)]
    x = draw.standard_normal((2 * NUM_MICROBATCHES, 8), np.float32)
    mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()[:1]), ("stage",)))
    mesh.register_layers(r"layer\d+", num_layers=NUM_LAYERS, axis="stage")
    with mesh, enable_task_fusion(fusion):
        cut = mjit(step)
    program = cut.lower(params, x).program
    assert sum(task.num_runs for task in program.tasks if "layer" in task.label) == num_runs
    if fusion == "never":
        assert {task.stage for task in program.tasks if "layer" in task.label} == {0}

    exact, plain, ours = Oracle(step, params, x), params, params
    wanted = params
    for _ in range(3):
        wanted, exact_loss = exact(wanted, x)
        plain, plain_loss = reference_a(step, plain, x)
        ours, ours_loss = cut(ours, x)
        compare(
            (ours, ours_loss), (plain, plain_loss), (plain, plain_loss), (wanted, exact_loss)
        ).check()
