"""Stacks of layers become one block per submesh, and gradients stay in pieces inside of loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_snapshot import snapshot
from jax import lax

from multimesh._src.partition.pipeline import Partitioned
from multimesh.jax import MultiMesh, Task, microbatch
from tests.partition.programs import cut

W, X = np.ones((4, 8, 8), np.float32), np.ones((4, 8), np.float32)


def make_multi_mesh(num_stages: int = 2, **layers: Any) -> MultiMesh:
    multi_mesh = MultiMesh(
        axis_sizes=(num_stages, 1),
        axis_names=("stage", "data"),
        devices=jax.devices()[:num_stages],
    )
    multi_mesh.register_layers(**{"matcher": "layer", "num_layers": 4, "scanned": True, **layers})
    return multi_mesh


def run_layers(w: Any, x: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            return x @ w, None

    return lax.scan(body, x, w)[0]


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(run_layers(w, x))


def train(w: Any, x: Any) -> Any:
    _, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(w, x)
    return w - grads / (1 + jnp.sum(grads * grads))


def partitioned(function: Callable[..., Any], *args: Any, **layers: Any) -> Partitioned:
    return cut(make_multi_mesh(**layers), function, *args)[0]


def homes(made: Partitioned) -> list[tuple[str, str]]:
    """The arguments and where they live."""
    program = made.program
    return [
        (argument.name, program.submeshes[program.home[var]].label)
        for var, argument in zip(program.arguments, made.traced.arguments, strict=True)
        if program.home.get(var, -1) >= 0
    ]


def test_a_train_step_on_blocks() -> None:
    _, texts = cut(make_multi_mesh(), train, W, X, donate_argnums=0)
    lines = texts["split_stacks"].splitlines()
    assert "\n".join([lines[0].replace(" const", "\n  const"), *lines[-16:]]) == snapshot("""\
train(%64:float32[2,8,8], %65:float32[2,8,8], %63:float32[2,2,8])
  constants (%66:int32[], %68:int32[])
    %84:float32[1,8,8] = add %80 %51
    %85:float32[1,8,8] = add %81 %52
  end %86 <- %82, %87 <- %83, %88 <- %84, %89 <- %85
  %90:float32[2,8,8] = concatenate %86 %87
  %91:float32[2,8,8] = concatenate %88 %89
  %92:float32[2,8,8] = mul %90 %90
  %93:float32[2,8,8] = mul %91 %91
  %94:float32[] = reduce_sum %92
  %95:float32[] = reduce_sum %93
  %96:float32[] = add %94 %95
  %60:float32[] = add 1.0 %96
  %97:float32[2,8,8] = div %90 %60
  %98:float32[2,8,8] = div %91 %60
  %99:float32[2,8,8] = sub %64 %97
  %100:float32[2,8,8] = sub %65 %98
return %99, %100\
""")


def test_rows_are_cut_inside_of_the_tasks_that_read_them() -> None:
    """At places that are arguments, so that equal layers are one body."""
    made = partitioned(train, W, X)
    layers = [task for task in made.program.tasks if task.name.startswith("layer_")]
    first, second = (next(t for t in layers if t.name == f"layer_{i}") for i in (0, 1))
    (block,) = (v for v in first.inputs if made.program.avals[v].shape == (2, 8, 8))
    assert block in second.inputs
    backward = {t.name: t for t in layers if t.kind == "BW"}
    assert backward["layer_1"].body is not None
    assert backward["layer_2"].body is not backward["layer_3"].body  # the last makes the loss
    forward = {t.name: t for t in layers if t.kind == "F"}
    assert forward["layer_1"].body is forward["layer_2"].body


def test_arguments_and_results_are_blocks_of_one_array() -> None:
    made = partitioned(train, W, X)
    assert homes(made)[:2] == [("w[0:2]", "stage=0"), ("w[2:4]", "stage=1")]
    blocks = [entry.block for entry in made.plan.inputs]
    assert [b and (b.index, b.number, b.count, b.axis) for b in blocks] == [
        (0, 0, 2, "stage"),
        (0, 1, 2, "stage"),
        None,
    ]
    assert [entry.argument for entry in made.plan.inputs] == [0, 0, 1]
    assert [b and b.number for b in made.plan.output_blocks] == [0, 1]
    assert [result.successor_of for result in made.traced.results] == [None, None]


def test_a_successor_is_the_same_block_of_the_argument() -> None:
    made, _ = cut(make_multi_mesh(), train, W, X, donate_argnums=0)
    assert [result.successor_of for result in made.traced.results] == [0, 1]


def test_layers_on_one_stage_are_no_stack() -> None:
    def on_one(w: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return x @ w[0] @ w[1]

    multi_mesh = make_multi_mesh()
    multi_mesh.register_task("head", task=Task(mesh_slice={"stage": 1}))
    made, texts = cut(multi_mesh, on_one, W, X)
    assert texts["split_stacks"] == texts["simplify_loops"]
    assert made.stacks == ()


def test_rows_that_all_stages_read_are_no_stack() -> None:
    def tied(w: Any, x: Any) -> Any:
        for index in range(2):
            with jax.named_scope(f"layer{index}"):
                x = x @ w[0] @ w[1]
        return x

    multi_mesh = make_multi_mesh(matcher=r"layer(\d)", num_layers=2, scanned=False)
    made, texts = cut(multi_mesh, tied, W, X)
    assert texts["split_stacks"] == texts["simplify_loops"]
    assert made.stacks == ()


def test_small_stacks_live_everywhere() -> None:
    def scaled(scale: Any, x: Any) -> Any:
        def body(x: Any, s: Any) -> Any:
            with jax.named_scope("layer"):
                return x * s, None

        return jnp.sum(lax.scan(body, x, scale)[0])

    made = partitioned(jax.grad(scaled), np.ones((4, 4), np.float32), np.ones((2, 4), np.float32))
    assert made.stacks == () and not any(made.plan.output_blocks)


def test_a_stack_of_unlike_submeshes_stays_on_one() -> None:
    """Submeshes that are not the slices of one axis cannot share one array."""
    multi_mesh = MultiMesh(
        axis_sizes=(2, 2), axis_names=("stage", "data"), devices=jax.devices()[:4]
    )
    places = [{"stage": 0}, {"stage": 1}, {"data": 0}, {"data": 1}]

    def place(name: str, backprop: bool) -> Task:
        return Task(name=name, mesh_slice=places[int(name[-1])])

    multi_mesh.register_task("layer", callback=place, scanned=True)
    made, _ = cut(multi_mesh, train, W, X)
    (facts,) = made.stacks
    assert facts.homes == ((0, 4, "stage=0"),)
    assert "not the slices of one axis" in facts.why
    assert {user for _, user, _ in facts.moved} == {"stage=1", "data=0", "data=1"}


@pytest.mark.parametrize(
    ("use", "kept"),
    [
        (lambda w: jnp.sum(w, axis=0).sum(), True),
        (lambda w: jnp.max(w), True),
        (lambda w: jnp.sum(w.transpose(0, 2, 1) * w), True),
        (lambda w: jnp.sum(jnp.where(w > 0, w, 0.0)[:, :4]), True),
        (lambda w: jnp.sum(w[1:3]), True),
        (lambda w: jnp.sum(w * jnp.arange(8.0)), True),
        (lambda w: jnp.sum(w / jnp.sqrt(jnp.mean(w * w, axis=-1, keepdims=True))), True),
        (lambda w: jnp.sum(jnp.einsum("lij,ljk->lik", w, w)), True),
        (lambda w: jnp.sum(jnp.concatenate([w, w], axis=1)), True),
        (lambda w: jnp.sum(jnp.cumsum(w, axis=0)), False),
        (lambda w: jnp.sum(w.reshape(-1) @ w.reshape(-1)), False),
        (lambda w: jnp.sum(w[::2]), False),
    ],
)
def test_what_acts_row_by_row_keeps_blocks(use: Callable[[Any], Any], kept: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        return loss(w, x) + use(w), w - use(w)

    (facts,) = partitioned(step, W, X).stacks
    assert (len(facts.homes) == 2) is kept
    assert bool(facts.why) is not kept
