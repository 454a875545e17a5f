"""Builds the tasks: bodies with the clones they need, inputs and outputs.

i = iota 8            # floating              task0(x) -> y   = { i = iota 8 ; y = x + i }
y = x + i             # layer0          ->    task1(y) -> z   = { i = iota 8 ; z = y * i }
z = y * i             # layer1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr

from multimesh._src.frontend.matching import Match
from multimesh._src.ir.body import make_body
from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Operand, Step, Var
from multimesh._src.ir.program import Kind, LoopNode, ProgramStep, TaskNode
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat import jaxprs
from multimesh._src.jax_compat.effects import name_callbacks
from multimesh._src.partition.constraints import place_shard_maps, resolve_constraints
from multimesh._src.partition.split.acyclic import split_acyclic
from multimesh._src.partition.split.groups import Group, group_equations
from multimesh._src.partition.split.regions import Flow, Region, region_of


@dataclass(slots=True)
class Splitter:
    """Numbers tasks and loops while the regions of a program are split.

    `task_of` gives the task of each placed equation by serial, `clones` the tasks that clone one.
    """

    program: FlatProgram
    flow: Flow
    submeshes: Sequence[Submesh]
    place: Mapping[int, int]
    seed: Mapping[int, Match]
    backward_name: Callable[[str], str]
    stages: dict[int, int | None] = field(default_factory=dict)
    reads: dict[Var, set[int]] = field(default_factory=dict)  # tasks and loops that import it
    num_nodes: int = 0
    task_of: dict[int, int] = field(default_factory=dict)
    clones: dict[int, list[int]] = field(default_factory=dict)

    def split(self) -> tuple[ProgramStep, ...]:
        """Returns the program's tasks and loops in dataflow order."""
        pieces = self._cut(self.program.steps, in_loop=False)
        return self._build(pieces)

    def _number(self) -> int:
        self.num_nodes += 1
        return self.num_nodes - 1

    def _cut(self, steps: tuple[Step, ...], *, in_loop: bool) -> "list[_Piece]":
        region = region_of(steps, self.flow)
        groups = group_equations(
            region, self.place, self.seed, self.flow.cloned.shared, in_loop, self.backward_name
        )
        pieces: list[_Piece] = []
        for positions in split_acyclic(region, groups):
            first = region.steps[positions[0]]
            number = self._number()
            if isinstance(first, Loop):
                inner = self._cut(first.body, in_loop=True)
                pieces.append(_Piece(number, first, inner, (), None, in_loop))
            else:
                equations = _equations(region, positions)
                group = groups[positions[0]]
                pieces.append(_Piece(number, None, [], equations, group, in_loop))
        for piece in pieces:
            self._note_reads(piece)
        return pieces

    def _note_reads(self, piece: "_Piece") -> None:
        steps = piece.equations if piece.loop is None else (piece.loop,)
        for step in steps:
            for var in self.flow.imports(step):
                self.reads.setdefault(var, set()).add(piece.number)

    def _build(self, pieces: "Sequence[_Piece]") -> tuple[ProgramStep, ...]:
        built: list[ProgramStep] = []
        for piece in pieces:
            if piece.loop is not None:
                built.append(
                    LoopNode(
                        index=piece.number,
                        length=piece.loop.length,
                        loop_index=piece.loop.index,
                        carries=piece.loop.carries,
                        tasks=self._build(piece.inner),
                        marker=piece.loop.marker,
                        microbatch=False,
                        condition=piece.loop.condition,
                    )
                )
            else:
                built.append(self._build_task(piece))
        return tuple(built)

    def _build_task(self, piece: "_Piece") -> TaskNode:
        group = piece.group
        assert group is not None
        outputs = tuple(
            var
            for equation in piece.equations
            for var in equation.outputs
            if var in self.flow.kept or self.reads.get(var, set()) - {piece.number}
        )
        equations, inputs = self._with_clones(piece.equations)
        self._note_equations(piece, equations)
        kind: Kind = "BW" if group.backward else "F"
        if not piece.in_loop and self._has_loops():
            kind = "-"
        self.stages[piece.number] = group.stage
        return TaskNode(
            index=piece.number,
            name=group.name,
            kind=kind,
            stage=-1,
            submesh=group.submesh,
            body=self._body(group, equations, inputs, outputs),
            inputs=inputs,
            outputs=outputs,
            origin=next(filter(None, (equation.line for equation in piece.equations)), ""),
            suffixes=group.suffixes,
        )

    def _note_equations(self, piece: "_Piece", equations: Sequence[Equation]) -> None:
        own = {equation.serial for equation in piece.equations}
        for equation in equations:
            if equation.serial in own:
                self.task_of[equation.serial] = piece.number
            else:
                self.clones.setdefault(equation.serial, []).append(piece.number)

    def _body(
        self,
        group: Group,
        equations: Sequence[Equation],
        inputs: Sequence[Var],
        outputs: Sequence[Var],
    ) -> ClosedJaxpr:
        body = make_body(equations, inputs, outputs, self.program.avals)
        body = jaxprs.map_eqns(body, lambda eqn: name_callbacks(eqn, group.name))
        mesh = self.submeshes[group.submesh].mesh
        pairs = group.pairs
        if pairs is None:
            pairs = tuple((axis, axis) for axis in mesh.axis_names)
        task = f"task `{group.name}`"
        resolved = resolve_constraints(body, pairs, mesh, task)
        return place_shard_maps(resolved, dict(mesh.shape), task)

    def _has_loops(self) -> bool:
        return any(isinstance(step, Loop) for step in self.program.steps)

    def _with_clones(
        self, equations: Sequence[Equation]
    ) -> tuple[tuple[Equation, ...], tuple[Var, ...]]:
        """Equations of a body with their clones before first use, and the variables imported."""
        made: set[Var] = set()
        inputs: dict[Var, None] = {}
        ordered: list[Equation] = []
        own = {var for equation in equations for var in equation.outputs}

        def missing_clone(operand: Operand) -> Equation | None:
            """The clone that has to come first; notes an import where there is none."""
            if isinstance(operand, Lit) or operand in made or operand in inputs:
                return None
            maker = self.flow.maker.get(operand)
            if operand in own or maker is None or maker.serial not in self.flow.cloned:
                inputs[operand] = None
                return None
            return maker

        for equation in equations:
            if made.issuperset(equation.outputs) and equation.outputs:
                continue
            todo = [equation]
            while todo:  # no recursion: chains of keys are long
                clone = next(filter(None, map(missing_clone, todo[-1].inputs)), None)
                if clone is not None:
                    todo.append(clone)
                    continue
                ordered.append(todo.pop())
                made.update(ordered[-1].outputs)
        return tuple(ordered), tuple(inputs)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A task or a loop before its body is built."""

    number: int
    loop: Loop | None
    inner: "list[_Piece]"
    equations: tuple[Equation, ...]
    group: Group | None
    in_loop: bool


def _equations(region: Region, positions: Sequence[int]) -> tuple[Equation, ...]:
    return tuple(
        step for step in (region.steps[p] for p in positions) if isinstance(step, Equation)
    )
