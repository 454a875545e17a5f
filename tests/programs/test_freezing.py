"""Models of which only a part is trained: what is frozen has no backward and nothing comes back.

`params` is a list of matrices, one a stage; `trained` says which of them have gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from multimesh.jax import MultiMesh, microbatch
from tests.programs.plainly import layer, normal, pipeline, sgd, square_loss
from tests.programs.training import arrays, check_once, stage_edges, train

WIDTH, ROWS, MICROBATCHES = 6, 2, 4
BATCHES = [(normal(8, WIDTH, seed=40 + k), normal(8, WIDTH, seed=50 + k)) for k in range(2)]


def matrices(number: int) -> list[Any]:
    return [normal(WIDTH, WIDTH, seed=index) / 2 for index in range(number)]


def step_of(trained: tuple[int, ...], schedule: Any) -> Any:
    """Gradient descent on some of the matrices."""

    def step(params: Any, batch: Any) -> Any:
        def loss(some: Any, batch: Any) -> Any:
            whole = [some.get(index, w) for index, w in enumerate(params)]
            return square_loss(whole, batch)

        grad = jax.value_and_grad(loss)
        grad = microbatch(grad, 0, ROWS, argnum=1, reduce="mean", schedule=schedule)
        value, grads = grad({index: params[index] for index in trained}, batch)
        new = [w - 0.1 * grads[index] if index in trained else w for index, w in enumerate(params)]
        return new, value

    return step


def stages_of(program: Any, *kinds: str) -> list[int]:
    """The stages that have tasks of these kinds in the loop."""
    tasks = (task for task in program.tasks if task.num_runs > 1)
    return sorted({t.stage for t in tasks if {*t.kind.split("+")}.intersection(kinds)})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("trained", [(1, 2), (2,), (0, 2), (0, 1)], ids=str)
def test_frozen_stages(trained, schedule):
    """A stage has a W where something is trained, a B from the first such stage on."""
    multi = pipeline(3)
    program = train(multi, step_of(trained, schedule), matrices(3), BATCHES, key=trained)
    check_once(program)
    first = min(trained)
    if schedule == "zb-h1":
        assert stages_of(program, "B") == [*range(first, 3)]
        assert stages_of(program, "W") == [*trained]
    else:
        assert stages_of(program, "BW") == [*range(first, 3)]
    forward = [(0, 1), (1, 2)]
    backward = [(stage, stage - 1) for stage in range(first + 1, 3)]
    assert stage_edges(program) == sorted(forward + backward)
    assert set(arrays(program).values()) == {MICROBATCHES}


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "zb-v"])
def test_first_stages_frozen_with_several_stages_on_a_submesh(schedule):
    placement = "v" if schedule == "zb-v" else "loop"
    multi = MultiMesh(axis_sizes=(2,), axis_names=("stage",), devices=jax.devices()[:2])
    multi.register_layers(r"layer\d+", num_layers=4, interleave=2, placement=placement)
    program = train(multi, step_of((2, 3), schedule), matrices(4), BATCHES, key="(2, 3) of 4")
    assert stages_of(program, "BW", "B", "W") == [2, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_stop_in_the_middle(schedule):
    """Stages before the stop have no backward; their weights come back where they were."""

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w)
            if index == 0:
                x = jax.lax.stop_gradient(x)
        return jnp.mean((x - y) ** 2)

    def step(params: Any, batch: Any) -> Any:
        grad = jax.value_and_grad(loss)
        grad = microbatch(grad, 0, ROWS, argnum=1, reduce="mean", schedule=schedule)
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    program = train(pipeline(3), step, matrices(3), BATCHES, key="stopped")
    assert stages_of(program, "BW", "B", "W") == [1, 2]
    assert stage_edges(program) == [(0, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("width", [3, WIDTH])
def test_unused_parameters_and_outputs_nobody_reads(width):
    """Parameters of 9 and of 36 elements: below and above what is replicated."""
    params = {
        "used": [normal(width, width, seed=index) / 2 for index in range(3)],
        "never": normal(width, width, seed=8),
        "for nothing": normal(width, width, seed=9),
    }

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        with layer(1):
            jnp.tanh(x @ params["for nothing"])
        return square_loss(params["used"], (x, y))

    def step(params: Any, batch: Any) -> Any:
        grad = microbatch(jax.value_and_grad(loss), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(params, batch)
        return sgd(params, grads), value

    batches = [(x[:, :width], y[:, :width]) for x, y in BATCHES]
    program = train(pipeline(3), step, params, batches)
    assert set(stage_edges(program)) == {(0, 1), (1, 2), (2, 1), (1, 0)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_low_rank_adapters(schedule):
    """Adapters on every stage under adam; the matrices below them are never written."""
    optimizer = optax.adam(0.02)
    adapters = [
        (normal(WIDTH, 2, seed=60 + i) / 2, normal(2, WIDTH, seed=70 + i) / 2) for i in range(3)
    ]

    def loss(adapters: Any, base: Any, batch: Any) -> Any:
        x, y = batch
        for index, (w, (a, b)) in enumerate(zip(base, adapters, strict=True)):
            with layer(index):
                x = jnp.tanh(x @ w + (x @ a) @ b)
        return jnp.mean((x - y) ** 2)

    def step(state: Any, batch: Any) -> Any:
        grad = microbatch(
            jax.value_and_grad(loss), 0, ROWS, argnum=2, reduce="mean", schedule=schedule
        )
        value, grads = grad(state["adapters"], state["base"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["adapters"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {"base": state["base"], "adapters": adapters, "opt": opt}, value

    state = {"base": matrices(3), "adapters": adapters, "opt": optimizer.init(adapters)}
    program = train(pipeline(3), step, state, BATCHES, key="adapters")
    assert {type_ for _, type_ in arrays(program)} == {f"float32[{ROWS},{WIDTH}]"}
    for index in range(3):
        (base,) = (a for a in program.arguments if a.name == f"state['base'][{index}]")
        assert base.home == f"stage={index}"
        assert base.returned_as == (f"result[0]['base'][{index}]",), "never copied"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_frozen_embedding(schedule):
    """The table is read by the first stage and by the last, and trained by neither."""
    table = normal(12, WIDTH, seed=5)

    def loss(params: Any, table: Any, batch: Any) -> Any:
        ids, labels = batch
        with layer(0):
            x = jax.lax.stop_gradient(table)[ids]
        for index, w in enumerate(params):
            with layer(index):
                x = jnp.tanh(x @ w)
        with layer(2):
            logits = x @ jax.lax.stop_gradient(table).T
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state: Any, batch: Any) -> Any:
        params, table = state
        grad = microbatch(
            jax.value_and_grad(loss), 0, ROWS, argnum=2, reduce="mean", schedule=schedule
        )
        value, grads = grad(params, table, batch)
        return (sgd(params, grads), table), value

    batches = [(np.arange(8) % 5 + k, (np.arange(8) + k) % 12) for k in range(2)]
    program = train(pipeline(3), step, (matrices(3), table), batches, key="embedding")
    check_once(program)
    sent = [r for r in program.reshards if r.value == "state[1]" and r.bytes]
    assert [(r.edge, r.copies) for r in sent] == [("stage=0 -> stage=2", 1)]


def test_labels_choose_what_is_trained():
    """`optax.multi_transform` with `set_to_zero`: gradients of what is frozen are never made."""
    frozen = optax.multi_transform(
        {"train": optax.adam(0.02), "freeze": optax.set_to_zero()},
        ["freeze", "train", "train"],
    )

    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        grad = microbatch(jax.value_and_grad(square_loss), 0, ROWS, argnum=1, reduce="mean")
        value, grads = grad(params, batch)
        updates, opt = frozen.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = matrices(3)
    program = train(pipeline(3), step, (params, frozen.init(params)), BATCHES)
    assert stages_of(program, "BW") == [1, 2]


def test_two_loops_of_one_step_train_different_parts():
    """First the head alone, then everything."""
    params = matrices(3)
    head, whole = step_of((2,), "1f1b"), step_of((0, 1, 2), "1f1b")

    def both(params: Any, batch: Any) -> Any:
        params, before = head(params, batch)
        params, after = whole(params, batch)
        return params, (before, after)

    check_once(train(pipeline(3), both, params, BATCHES))


@pytest.mark.parametrize("steps", ["each its own", "one for both"])
def test_loops_over_some_stages_leave_the_state_of_others_alone(steps):
    """Gradients of what a loop does not read are zero, and no state of the loop."""
    adam = optax.adam(0.05)

    def part(some):
        def loss(params, batch):
            x, y = batch
            for index in some:
                with layer(index):
                    x = jnp.tanh(x @ params[index])
            return jnp.mean((x - y) ** 2)

        return microbatch(jax.value_and_grad(loss), 0, ROWS, argnum=1, reduce="mean")

    def step(state, batch):
        params, opt = state
        (one, first), (two, second) = part((0,))(params, batch), part((1,))(params, batch)
        if steps == "each its own":
            updates, opt = adam.update(first, opt, params)
            params = optax.apply_updates(params, updates)
            updates, opt = adam.update(second, opt, params)
        else:
            updates, opt = adam.update(jax.tree.map(jnp.add, first, second), opt, params)
        return (optax.apply_updates(params, updates), opt), one + two

    params = matrices(2)
    program = train(pipeline(2), step, (params, adam.init(params)), BATCHES)
    assert f"float32[{WIDTH},{WIDTH}]" not in {type_ for _, type_ in arrays(program)}
    for argument in program.arguments:
        index = next((i for i in range(2) if argument.name.endswith(f"[{i}]")), None)
        if argument.bytes == 4 * WIDTH * WIDTH and index is not None:
            assert argument.home == f"stage={index}", argument
