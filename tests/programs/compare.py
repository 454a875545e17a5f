"""Runs the program of a `Spec` as ours and as the references, and compares by R1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import multimesh.jax as mm
from multimesh._src.runtime import counters
from tests.oracle import Oracle, bitwise_equal, compare
from tests.programs.generator import (
    MICROBATCH_SIZE,
    Surroundings,
    make_batches,
    make_state,
    make_step,
    plain,
)
from tests.programs.spec import Spec

Tree: TypeAlias = Any
Step: TypeAlias = Callable[[Tree, Tree], tuple[Tree, Tree]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison of one program found; it passed if there is an outcome."""

    num_arrays: int
    num_bitwise: int
    one_device: bool  # all submeshes have one device: bitwise equality is the aim


def check_program(spec: Spec) -> Outcome:
    """Runs `spec` and applies R1 after the first and after the last step.

    Raises:
        IllConditionedError: if the references are too far off to judge by.
        AssertionError: if ours is off, retraces, recompiles or differs from its own repetition.
    """
    batches = make_batches(spec)[: spec.num_steps]
    refs = [_run_reference(spec, batches, mesh) for mesh in (None, _mesh_b(spec))]
    oracle = Oracle(make_step(spec, plain(None)), make_state(spec), batches[0])
    exact = run_steps(oracle, make_state(spec), batches)
    ours = run_ours(spec, batches)
    comparisons = [compare(*step) for step in zip(ours, *refs, exact, strict=True)]
    for comparison in comparisons:
        comparison.check()
    one_device = all(sizes == (1, 1) for sizes in spec.submeshes)
    last = comparisons[-1]
    return Outcome(len(last.leaves), last.num_bitwise, one_device)


def run_ours(spec: Spec, batches: list[Tree]) -> tuple[Tree, Tree]:
    """Runs the steps with MultiMesh and checks the promises that R1 does not name."""
    after_first = []
    with multi_mesh(spec):
        donated = 0 if spec.donate else None
        step = mm.mjit(make_step(spec, _surroundings(spec)), donate_argnums=donated)

        def counted(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            results = step(state, batch)
            after_first.append(counters.snapshot())
            return results

        first, last = run_steps(counted, make_state(spec), batches)
        new = counters.since(after_first[0])
        again, _ = run_steps(step, make_state(spec), batches[:1])
    repeated = (new.traces, new.compiles, new.argument_moves)
    assert repeated == (0, 0, 0), f"later steps trace, compile or move the state: {new}"
    same = jax.tree.map(bitwise_equal, again, first)
    assert jax.tree.all(same), f"a run repeated differs from itself: {same}"
    return first, last


def run_steps(step: Step, state: Tree, batches: list[Tree]) -> tuple[Tree, Tree]:
    """Runs `step` on each batch in turn; returns what the first and the last gave, on the host."""
    first = last = None
    for batch in batches:
        last = step(state, batch)
        state = last[0]
        # At once: the next step may be given the state for good.
        first = jax.tree.map(_on_host, last) if first is None else first
    return first, jax.tree.map(_on_host, last)


def multi_mesh(spec: Spec) -> mm.MultiMesh:
    """The MultiMesh of `spec`, with its tasks registered."""
    if spec.sliced is not None:
        sizes, names = spec.sliced, ("stage", "data", "model")
    else:
        sizes, names = (sum(d * m for d, m in spec.submeshes),), ("all",)
    num = int(np.prod(sizes))
    axis_type = AxisType.Explicit if spec.explicit_axes else AxisType.Auto
    devices = np.array(jax.devices()[:num]).reshape(sizes)
    mesh = Mesh(devices, names, axis_types=(axis_type,) * len(names))
    multi = mm.MultiMesh(global_mesh=mesh)
    if spec.scanned:
        multi.register_task(
            "layer", callback=lambda name, backprop: _task(spec, int(name[6:])), scanned=True
        )
    else:
        multi.register_task(r"layer(\d+)", callback=lambda name, backprop: _task(spec, int(name)))
    return multi


def _task(spec: Spec, layer: int) -> mm.Task:
    submesh, name = spec.layers[layer].submesh, f"layer{layer}"
    # Submeshes that are visited twice do not tell the stages.
    stage = spec.layers[layer].stage if spec.chunks > 1 else None
    if spec.sliced is not None:
        return mm.Task(name=name, mesh_slice={"stage": submesh}, stage=stage)
    sizes = spec.submeshes[submesh]
    first = sum(d * m for d, m in spec.submeshes[:submesh])
    devices = list(range(first, first + sizes[0] * sizes[1]))
    mesh = mm.TaskMesh(devices=devices, axis_sizes=sizes, axis_names=("data", "model"))
    return mm.Task(name=name, mesh=mesh, stage=stage)


def _surroundings(spec: Spec) -> Surroundings:
    def cut(fun: Callable[..., Tree], reduce: Tree, schedule: str) -> Callable[..., Tree]:
        how = schedule or None
        return mm.microbatch(fun, 0, MICROBATCH_SIZE, argnum=1, schedule=how, reduce=reduce)

    return Surroundings(cut, mm.with_sharding_constraint)


def _mesh_b(spec: Spec) -> Mesh:
    sizes = spec.largest
    return Mesh(np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes), ("data", "model"))


def _run_reference(spec: Spec, batches: list[Tree], mesh: Mesh | None) -> tuple[Tree, Tree]:
    """Plain `jax.jit`: A on one device, B on `mesh` with the rows over its data axis."""
    step, state = jax.jit(make_step(spec, plain(mesh))), make_state(spec)
    if mesh is None:
        placed = jax.device_put((state, batches), jax.devices()[0])
    else:
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        placed = jax.device_put((state, batches), (whole, rows))
    return run_steps(step, *placed)


def _on_host(x: Any) -> Any:
    is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(np.array(jax.random.key_data(x))) if is_key else np.array(x)
