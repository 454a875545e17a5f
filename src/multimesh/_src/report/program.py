"""What became of a function, as data: tasks, reshards, arguments, loops, and what to look at.

`report.make` fills these in, `report.explain` shows them.
"""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult

from multimesh._src.partition.stacks.facts import StackFacts
from multimesh._src.report import explain
from multimesh._src.report.arguments import ArgumentReport
from multimesh._src.report.code import CodeReport, RegistrationReport, UnmappedReport, WholeReport
from multimesh._src.report.traffic import Reshard
from multimesh._src.schedule.simulate import Simulation


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task, or several that are fused into one program.

    Attributes:
        label: Its name, from the second task of that name on with `#2`, `#3`, ...
        name: Its name; those of fused tasks are joined by `+`.
        kind: `F`, `B`, `W`, `BW`, or `-` outside of loops; of fused tasks `F+BW`.
        stage: Its stage, -1 where it is no action of a pipeline.
        when: `before`, `between` or `after` the loops of the program; empty inside them, and in a
            program without loops.
        submesh: The label of its submesh.
        num_runs: How often a call runs it.
        executable: Number of its program; tasks with the same number share it.
        flops: Operations of one run, on all devices together, as `report.flops` counts them.
        num_inputs: Arrays that it reads.
        input_bytes: Their size, unsharded.
        num_outputs: Arrays that it makes.
        output_bytes: Their size, unsharded.
        arguments: The arguments of the function that it reads, by the user's names.
        parameters: Those of them that are not cut into microbatches: parameters and state.
        parameter_bytes: The size of the parameters, unsharded.
        num_in_place: How many results are written over an input.
        origin: The user's `file:line` of its first equation.
    """

    label: str
    name: str
    kind: str
    stage: int
    when: str
    submesh: str
    num_runs: int
    executable: int
    flops: int
    num_inputs: int
    input_bytes: int
    num_outputs: int
    output_bytes: int
    arguments: tuple[str, ...]
    parameters: tuple[str, ...]
    parameter_bytes: int
    num_in_place: int
    origin: str


@dataclass(frozen=True, slots=True)
class SubmeshReport:
    """One submesh.

    Attributes:
        label: How users see it.
        devices: Its devices.
        axes: Its axes of more than one device.
        argument_bytes: Size of the arguments that live there alone, unsharded.
        state_bytes: What one device holds of arguments and constants.
        peak_bytes: What one device holds at most, buffers alone, by the order of the plan.
        residual_sets: How many sets of residuals the schedule keeps there at most; 0 without one.
        residual_bytes: Their size, unsharded.
        flops: Operations of one call.
    """

    label: str
    devices: str
    axes: str
    argument_bytes: int
    state_bytes: int
    peak_bytes: int
    residual_sets: int
    residual_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class WholeBackward:
    """A backward task that its schedule would run in halves, but that cannot be split (S3).

    `primitive` is what its contractions stand inside of, at the user's `line`.
    """

    task: str
    primitive: str
    line: str


@dataclass(frozen=True, slots=True)
class CarryReport:
    """What an iteration needs of the one before: its type, who makes it and who reads it."""

    type: str
    writer: str
    reader: str


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop: its tasks, and for a microbatch loop the simulation of its schedule.

    The `length` of a `while` is 0: nobody knows it. `carried` says of a sequential loop what an
    iteration needs of the one before, if that is known. `is_microbatch` says that `microbatch` made
    the loop, `holds_loops` that loops stand in it, `holds_while` that one of them is a `while`.
    """

    length: int
    tasks: tuple[str, ...]
    simulation: Simulation | None
    whole: tuple[WholeBackward, ...]
    carried: CarryReport | None
    is_microbatch: bool
    holds_loops: bool
    holds_while: bool


@dataclass(frozen=True, slots=True, repr=False)
class ProgramReport:
    """What became of a function. Printed, it is a text of sections.

    Attributes:
        name: Name of the function.
        submeshes: The submeshes of its tasks and arguments.
        idle: Slices of the MultiMesh that no task uses.
        unused_axes: Axes of submeshes that shard no value, as `data=4`.
        tasks: The tasks, in the order of their first runs.
        reshards: What is copied in one call, in order of the first copy.
        arguments: The arguments of the function.
        everywhere: Arguments and results that live on all submeshes.
        loops: The loops that were cut.
        code: What became of code in no registered scope.
        registrations: What the registered matchers matched.
        unmapped: Names in sharding constraints that no task maps to a mesh axis.
        whole: Control flow over several submeshes that was not cut.
        num_executables: Distinct programs that are compiled.
        num_bodies: Distinct programs, if those on several submeshes count once.
        num_copies: Copies in one call; one may carry several values.
    """

    name: str
    submeshes: tuple[SubmeshReport, ...]
    idle: tuple[str, ...]
    unused_axes: tuple[str, ...]
    tasks: tuple[TaskReport, ...]
    reshards: tuple[Reshard, ...]
    arguments: tuple[ArgumentReport, ...]
    everywhere: tuple[str, ...]
    stacks: tuple[StackFacts, ...]
    loops: tuple[LoopReport, ...]
    code: tuple[CodeReport, ...]
    registrations: tuple[RegistrationReport, ...]
    unmapped: tuple[UnmappedReport, ...]
    whole: tuple[WholeReport, ...]
    num_executables: int
    num_bodies: int
    num_copies: int

    def as_text(self) -> str:
        """The report as plain text; the same program gives the same text."""
        return explain.as_text(self)

    def __str__(self) -> str:
        return self.as_text()

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from explain.as_rich(self, options.max_width)
