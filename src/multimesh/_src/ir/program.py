"""The program: tasks bound to submeshes, and loops of tasks, ordered by dataflow only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from multimesh._src.ir.flat import Carry, Operand, Var
from multimesh._src.ir.submesh import Submesh

Kind: TypeAlias = Literal["F", "B", "W", "BW", "-"]
"""Forward, backward (whole, or its activation and weight half), or neither."""


@dataclass(frozen=True, slots=True)
class TaskNode:
    """A piece of the program bound to one submesh.

    `inputs` and `outputs` are the variables that its body takes and gives, in order. `stage` is -1
    where the task is no action of a pipeline. `origin` is the user's `file:line` of its first
    equation. `suffixes` are added to the names of the halves when a backward task is split.
    """

    index: int
    name: str
    kind: Kind
    stage: int
    submesh: int
    body: ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    origin: str
    suffixes: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class LoopNode:
    """A loop whose tasks run `length` times. `microbatch` says that a schedule may order them.

    A `while` has a `condition`, the value inside of a carry, and runs as long as that is true.
    `spread` is for accumulators of rotating tasks: the carry, by iteration, that a carried variable
    stands for.
    """

    index: int
    length: int
    loop_index: Var
    carries: tuple[Carry, ...]
    tasks: tuple["ProgramStep", ...]
    marker: str
    microbatch: bool
    condition: Var | None = None
    spread: Mapping[Var, tuple[Var, ...]] = field(default_factory=dict[Var, tuple[Var, ...]])

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The results of the loop, one per carry."""
        return tuple(carry.result for carry in self.carries)


ProgramStep: TypeAlias = TaskNode | LoopNode


@dataclass(frozen=True, slots=True)
class Program:
    """All tasks, and where every variable that crosses a task boundary lives.

    `home` is the submesh of a variable (arguments included), `specs` its layout on each submesh
    that holds it. Variables that are replicated everywhere (scalars, small arguments) have the home
    `EVERYWHERE`. `memory` has the memory kind of variables that do not live in the default memory.
    """

    name: str
    submeshes: tuple[Submesh, ...]
    avals: Mapping[Var, Any]
    arguments: tuple[Var, ...]
    constants: Mapping[Var, Any]
    steps: tuple[ProgramStep, ...]
    results: tuple[Operand, ...]
    home: Mapping[Var, int]
    specs: Mapping[tuple[Var, int], PartitionSpec]
    memory: Mapping[Var, str] = field(default_factory=dict[Var, str])

    @property
    def tasks(self) -> tuple[TaskNode, ...]:
        """Every task once, loops opened, in order."""
        return tuple(all_tasks(self.steps))


EVERYWHERE = -1


def all_tasks(steps: tuple[ProgramStep, ...]) -> Iterator[TaskNode]:
    """The tasks of some steps at any depth."""
    for step in steps:
        if isinstance(step, LoopNode):
            yield from all_tasks(step.tasks)
        else:
            yield step


def all_loops(steps: tuple[ProgramStep, ...]) -> Iterator[LoopNode]:
    """The loops of some steps at any depth, outer ones first."""
    for step in steps:
        if isinstance(step, LoopNode):
            yield step
            yield from all_loops(step.tasks)
