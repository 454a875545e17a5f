"""What a training step of the GPT moves between stages, and what evaluation and generation do."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from multimesh._src.runtime import counters
from multimesh.jax import mjit

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_MICROBATCHES, ROWS, CONTEXT, WIDTH = 8, 2, 16, 32


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_gpt")


class Setting:
    """The example's step at a small size, on `stages` submeshes of (2 data, 8 / stages / 2)."""

    def __init__(self, example: ModuleType, stages: int, tied: bool):
        args = SimpleNamespace(
            stages=stages,
            data=2,
            model=4 // stages,
            layers=stages,
            interleave=1,
            placement="loop",
            explicit=False,
        )
        self.config = example.Config(num_layers=stages, width=WIDTH, context=CONTEXT, tied=tied)
        optimizer = example.make_optimizer(8)
        step = example.make_train_step(self.config, optimizer, ROWS * NUM_MICROBATCHES, "1f1b")

        def init_state(key: Any) -> Any:
            params = example.init_params(self.config, key)
            return {"params": params, "optimizer": optimizer.init(params), "step": np.int32(0)}

        with example.make_multi_mesh(args):
            self.init = mjit(init_state)
            self.step = mjit(step, donate_argnums=0)
            self.evaluate = mjit(example.make_eval_step(self.config, ROWS))
            self.generate = mjit(example.make_generate(self.config), donate_argnums=1)
            self.state = jax.eval_shape(init_state, jax.random.key(0))
        self.text = np.zeros((ROWS * NUM_MICROBATCHES, CONTEXT + 1), np.int32)


def crossings(program: Any) -> dict[tuple[str, str], int]:
    """Copies a step by edge and type, without views of what is there already."""
    found: dict[tuple[str, str], int] = {}
    for reshard in program.reshards:
        if reshard.bytes:
            key = reshard.edge, reshard.type
            found[key] = found.get(key, 0) + reshard.copies
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_training_step_moves_what_it_must(train_gpt: ModuleType, stages: int, tied: bool) -> None:
    setting = Setting(train_gpt, stages, tied)
    program = setting.step.lower(setting.state, setting.text).program
    found, last = crossings(program), stages - 1

    # in the loop: an activation and a gradient for each boundary and microbatch
    stream = f"float32[{ROWS},{CONTEXT},{WIDTH}]"
    for stage in range(last):
        for edge in (f"stage={stage} -> stage={stage + 1}", f"stage={stage + 1} -> stage={stage}"):
            assert found.pop((edge, stream)) == NUM_MICROBATCHES

    # once a step: the text, for the labels; the tied table and its gradient
    there, back = f"stage=0 -> stage={last}", f"stage={last} -> stage=0"
    assert found.pop((there, f"int32[{NUM_MICROBATCHES},{ROWS},{CONTEXT + 1}]")) == 1
    if tied:
        table = f"float32[256,{WIDTH}]"
        assert found.pop((there, table)) == found.pop((back, table)) == 1

    # scalars: to one stage a partial norm of each other one, and the total back; loss and counters
    loss_and_counters = {
        key: found.pop(key) for key in list(found) if key[0].endswith("everywhere")
    }
    assert sum(loss_and_counters.values()) == 4
    assert set(found.values()) == {1} and {type_ for _, type_ in found} == {"float32[]"}
    edges = {tuple(edge.split(" -> ")) for edge, _ in found}
    total_at = min(set.intersection(*map(set, edges)))  # with two stages either will do
    others = {f"stage={stage}" for stage in range(stages)} - {total_at}
    assert edges == {(a, total_at) for a in others} | {(total_at, a) for a in others}


@pytest.mark.parametrize("stages", [2, 4])
def test_nothing_of_the_optimizer_runs_before_the_loop(train_gpt: ModuleType, stages: int) -> None:
    setting = Setting(train_gpt, stages, tied=True)
    tasks = setting.step.lower(setting.state, setting.text).program.tasks
    first = next(position for position, task in enumerate(tasks) if task.kind.startswith("F"))
    read = {name for task in tasks[:first] for name in task.parameters}
    assert read <= {"state['params']['embed']['embedding']"}, "only zeros and the tied table"
    assert any("'optimizer'" in name for task in tasks[first:] for name in task.parameters)


@pytest.mark.slow
def test_state_and_cache_stay_in_place(train_gpt: ModuleType) -> None:
    setting = Setting(train_gpt, 2, tied=True)
    state = setting.init(jax.random.key(0))
    prompt = np.zeros((2, 4), np.int32)
    cache = train_gpt.empty_cache(setting.config, 2)
    for _ in range(2):
        state, _ = setting.step(state, setting.text)
        setting.evaluate(state["params"], setting.text)
        _, cache = setting.generate(state["params"], cache, prompt, jax.random.key(1))
    before = counters.snapshot()
    state, _ = setting.step(state, setting.text)
    setting.evaluate(state["params"], setting.text)
    old = cache
    _, cache = setting.generate(state["params"], cache, prompt, jax.random.key(1))
    since = counters.since(before)
    assert (since.traces, since.lowerings, since.compiles) == (0, 0, 0)
    assert since.argument_moves == 1, "the key alone"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    shardings = jax.tree.map(lambda a, b: (a.sharding, b.sharding), old, cache)
    for one, other in jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, tuple)):
        assert one == other
    devices = [{d.id for d in layer["key"].devices()} for layer in cache]
    assert devices == [{0, 1, 2, 3}, {4, 5, 6, 7}]
