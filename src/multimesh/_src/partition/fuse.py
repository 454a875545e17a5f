"""Fuses runs that a schedule always runs together into one executable (P7).

    run layer1_fwd[3]: a w -> y r                run layer1_fwd+layer1_bwd[3]: a w acc -> acc'
    run layer1_bwd[3]: y r w acc -> acc'   ->

The last stage's forward and backward of a microbatch follow each other at once, and so do the two
parts of an overlapped pair. In one executable XLA can overlap them, and what only passes between
them is no buffer any more. Copies between two such runs move before or behind the fused one; runs
that wait for a copy of what the other makes stay apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from multimesh._src.ir.plan import Copy, Executable, HostLoop, Plan, Run, Slot, Step
from multimesh._src.jax_compat import jaxprs

Wiring: TypeAlias = tuple[tuple[int, ...], ...]
"""For every input of every part, its number among the values of the fused executable."""


def fuse_runs(plan: Plan) -> Plan:
    """Returns the plan with the runs of each group fused as far as copies allow."""
    readers = _readers(plan)
    fuser = _Fuser(list(plan.executables), readers, {})
    steps: list[Step] = []
    for chunk in _chunks(plan.steps):
        steps += fuser.fuse(chunk)
    steps = [
        replace(step, plan=fuse_runs(step.plan)) if isinstance(step, HostLoop) else step
        for step in steps
    ]
    return replace(plan, steps=tuple(steps), executables=tuple(fuser.executables))


def _readers(plan: Plan) -> dict[Slot, set[int]]:
    """Which steps read a slot, by position; -1 stands for the caller."""
    readers: dict[Slot, set[int]] = {slot: {-1} for slot in plan.outputs}
    for position, step in enumerate(plan.steps):
        for slot in step.sources if isinstance(step, Copy) else step.inputs:
            readers.setdefault(slot, set()).add(position)
    return readers


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Neighbouring steps: the runs of one group with the copies between them, or a single step."""

    start: int
    steps: tuple[Step, ...]


def _chunks(steps: Sequence[Step]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    position = 0
    while position < len(steps):
        first = steps[position]
        end = position + 1
        if isinstance(first, Run) and first.group >= 0:
            for later in range(position + 1, len(steps)):
                step = steps[later]
                if isinstance(step, Run):
                    if step.group != first.group:
                        break
                    end = later + 1
        chunks.append(_Chunk(position, tuple(steps[position:end])))
        position = end
    return chunks


@dataclass(slots=True)
class _Fuser:
    """Makes fused executables, each once."""

    executables: list[Executable]
    readers: Mapping[Slot, set[int]]
    made: dict[Any, int]

    def fuse(self, chunk: _Chunk) -> list[Step]:
        runs = [step for step in chunk.steps if isinstance(step, Run)]
        submeshes = {self.executables[run.executable].submesh.index for run in runs}
        if len(runs) < 2 or len(submeshes) > 1:
            return list(chunk.steps)
        made = {slot for run in runs for slot in run.outputs}
        before: list[Step] = []
        behind: list[Step] = []
        late: set[Slot] = set(made)
        for step in chunk.steps:
            if isinstance(step, Copy):
                waits = any(slot in late for slot in step.sources)
                (behind if waits else before).append(step)
                late.update(step.targets if waits else ())
        arriving = {slot for step in behind if isinstance(step, Copy) for slot in step.targets}
        if any(slot in arriving for run in runs for slot in run.inputs):
            return list(chunk.steps)
        return [*before, self._fused(runs, chunk), *behind]

    def _fused(self, runs: Sequence[Run], chunk: _Chunk) -> Run:
        inside = {
            chunk.start + offset for offset, step in enumerate(chunk.steps) if isinstance(step, Run)
        }
        made = dict.fromkeys(slot for run in runs for slot in run.outputs)
        outputs = tuple(slot for slot in made if self.readers.get(slot, set()) - inside)
        reads = dict.fromkeys(slot for run in runs for slot in run.inputs)
        inputs = tuple(slot for slot in reads if slot not in made)
        number = {slot: i for i, slot in enumerate((*inputs, *made))}
        wiring = tuple(tuple(number[slot] for slot in run.inputs) for run in runs)
        kept = tuple(number[slot] for slot in outputs)
        parts = tuple(run.executable for run in runs)
        key = (parts, wiring, kept)
        if key not in self.made:
            self.made[key] = len(self.executables)
            joined = _join([self.executables[n] for n in parts], len(inputs), wiring, kept)
            self.executables.append(replace(joined, parts=parts))
        first = runs[0]
        return Run(
            executable=self.made[key],
            inputs=inputs,
            outputs=outputs,
            task="+".join(dict.fromkeys(run.task for run in runs)),
            iteration=first.iteration,
            group=first.group,
        )


def _join(
    parts: Sequence[Executable], num_inputs: int, wiring: Wiring, kept: tuple[int, ...]
) -> Executable:
    """One executable that runs the parts in turn. `kept` numbers the values it gives back."""
    atoms: list[Any] = [None] * num_inputs
    specs: list[PartitionSpec] = [PartitionSpec()] * num_inputs
    eqns: list[Any] = []
    for part, inputs in zip(parts, wiring, strict=True):
        body = jaxprs.open_jaxpr(part.body)
        renamed: dict[Any, Any] = {}
        for var, number, spec in zip(body.invars, inputs, part.in_specs, strict=True):
            if atoms[number] is None:
                atoms[number] = jaxprs.new_var(var.aval)
                specs[number] = spec
            renamed[var] = atoms[number]
        eqns += jaxprs.fresh_eqns(body.eqns, renamed)
        atoms += [v if jaxprs.is_literal(v) else renamed[v] for v in body.outvars]
        specs += part.out_specs
    return Executable(
        name="+".join(dict.fromkeys(part.name for part in parts)),
        body=jaxprs.new_closed_jaxpr(atoms[:num_inputs], [atoms[number] for number in kept], eqns),
        submesh=parts[0].submesh,
        in_specs=tuple(specs[:num_inputs]),
        out_specs=tuple(specs[number] for number in kept),
    )
