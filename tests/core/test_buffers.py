"""A task takes and gives no buffer that it could do without: a call costs about 1 us for each."""

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from multimesh._src.ir.plan import Copy, Executable, Plan, Run
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.dedupe import hashable
from multimesh.jax import MultiMesh, Task, microbatch, mjit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_STAGES, BLOCKS_A_STAGE, PARAMETERS_A_BLOCK = 4, 5, 12
NUM_MICROBATCHES, ROWS, WIDTH = 4, 2, 8


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "zb-h1"])
def plan(request: pytest.FixtureRequest) -> Plan:
    """A train step of the GPT of `benchmarks/dispatch.py`: one task a stage and direction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        model = importlib.import_module("_models").GPT

    def step(params: Any, batch: Any) -> Any:
        gradient = microbatch(
            jax.value_and_grad(model.loss), 0, ROWS, argnum=1, schedule=request.param
        )
        loss, grads = gradient(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    def stage(text: str, backprop: bool) -> Task:
        number = int(text) // BLOCKS_A_STAGE
        name = f"stage{number}_{'bwd' if backprop else 'fwd'}"
        return Task(name=name, mesh_slice={"stage": number}, stage=number)

    multi_mesh = MultiMesh(global_mesh=Mesh(np.array(jax.devices()[:NUM_STAGES]), ("stage",)))
    multi_mesh.register_task(r"layer(\d+)", callback=stage)
    with multi_mesh:
        lowered = mjit(step).lower(
            model.params(NUM_STAGES * BLOCKS_A_STAGE, WIDTH),
            model.batch(NUM_MICROBATCHES * ROWS, WIDTH),
        )
    return lowered._partitioned.plan


def runs(plan: Plan) -> Iterator[tuple[Run, Executable]]:
    for step in plan.steps:
        if isinstance(step, Run):
            yield step, plan.executables[step.executable]


def test_a_stage_takes_all_its_parameters(plan: Plan) -> None:
    found = [run for run, _ in runs(plan) if run.task == "stage1_fwd"]
    assert len(found) == NUM_MICROBATCHES
    assert {len(run.inputs) for run in found} == {BLOCKS_A_STAGE * PARAMETERS_A_BLOCK + 1}


def test_no_value_is_both_input_and_output(plan: Plan) -> None:
    for run, executable in runs(plan):
        body = jaxprs.open_jaxpr(executable.body)
        assert not set(body.invars) & set(body.outvars), run.task
        assert not any(map(jaxprs.is_literal, body.outvars)), run.task


def test_nothing_is_taken_twice_or_without_need(plan: Plan) -> None:
    for run, executable in runs(plan):
        body = jaxprs.open_jaxpr(executable.body)
        read = {atom for eqn in body.eqns for atom in eqn.invars if not jaxprs.is_literal(atom)}
        assert len(set(run.inputs)) == len(run.inputs), run.task
        assert set(body.invars) <= read, run.task


def test_nothing_is_given_twice(plan: Plan) -> None:
    for run, executable in runs(plan):
        if run.iteration < 0:
            continue  # accumulators start as equal zeros, each in a buffer of its own
        values = numbered_values(executable.body)
        assert max(Counter(values).values()) == 1, run.task


def test_nothing_is_given_that_nobody_reads(plan: Plan) -> None:
    read = set(plan.outputs)
    for step in plan.steps:
        read.update(step.sources if isinstance(step, Copy) else step.inputs)
    for run, _ in runs(plan):
        assert set(run.outputs) <= read, run.task


def numbered_values(jaxpr: Any) -> list[int]:
    """The outputs of a jaxpr by number; values that are computed alike have the same one."""
    body = jaxprs.open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}
    values: dict[Any, int] = {var: -1 - position for position, var in enumerate(body.invars)}

    def value(atom: Any) -> Any:
        return hashable(np.asarray(atom.val)) if jaxprs.is_literal(atom) else values[atom]

    for eqn in body.eqns:
        params = tuple((name, hashable(param)) for name, param in sorted(eqn.params.items()))
        inputs = tuple(map(value, eqn.invars))
        for position, var in enumerate(eqn.outvars):
            key = eqn.primitive, params, inputs, position
            values[var] = numbers.setdefault(key, len(numbers))
    return [values[var] for var in body.outvars]
