"""Makes conditionals of guarded equations: one per submesh and piece (R12).

    if p:  a = layer0(x) @0 ; b = layer1(a) @1        a    = cond[p] { layer0(x) | zeros }  @0
    else:  c = layer1(x) @1                      ->   y    = cond[p] { layer1(a) | layer1(x) }  @1
    y = choose p b c @1

Equations of one conditional that share a submesh become one real conditional, in the fewest pieces
that do not wait for each other. So a branch that is not taken costs nothing, and its NaNs and
effects never happen. What a piece makes and others read is a result of it: zeros in the branches
that do not make it. A choice joins the piece on its submesh; one that stands alone stays a
`select_n`. Inner conditionals are made first. In a loop inside a branch, every iteration has its
pieces, and the loop carries zeros when the branch is not taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from multimesh._src.frontend.matching import Match
from multimesh._src.ir.body import make_body
from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Guard,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    all_equations,
)
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.assign.cloned import Cloned, cost_of
from multimesh._src.partition.inline import Builder, empty
from multimesh._src.partition.seeds import Seeds
from multimesh._src.partition.split.acyclic import split_acyclic
from multimesh._src.partition.split.groups import backward_phase
from multimesh._src.partition.split.regions import Flow, Region, analyze_flow, region_of


def join_branches(
    program: FlatProgram,
    place: Mapping[int, int],
    match: Mapping[int, Match],
    cloned: Cloned,
    seeds: Seeds,
) -> FlatProgram:
    """Returns the program without guards.

    A conditional has the serial, and so the place and the match, of one of its equations.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
        match: Match of each seed, by serial.
        cloned: Equations that every user makes for itself.
        seeds: What a builder of equations needs.
    """
    if not any(equation.guards or equation.chooses for equation in all_equations(program.steps)):
        return program
    program = replace(program, steps=_free(program.steps, cloned, set()))
    builder = Builder(seeds, avals=dict(program.avals))
    joiner = _Joiner(builder, place, match, cloned, analyze_flow(program, cloned))
    for equation in all_equations(program.steps):
        joiner.note_reads(equation)
    steps = joiner.region(program.steps)
    return replace(program, avals=builder.avals, steps=steps)


def _free(steps: tuple[Step, ...], cloned: Cloned, bound: set[Var]) -> tuple[Step, ...]:
    """Takes the guards from what costs next to nothing and is never wrong: zeros, iotas."""
    done: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            step = replace(step, body=_free(step.body, cloned, bound))
        elif step.serial in cloned.floating and not step.chooses and cost_of(step.eqn) <= 1:
            reads = {v for v in step.inputs if not isinstance(v, Lit)}
            step = replace(step, guards=()) if reads.isdisjoint(bound) else step
        if step.guards:
            bound.update(step.outputs)
        done.append(step)
    return tuple(done)


@dataclass(frozen=True, slots=True)
class _Key:
    """Equations of one conditional and equal keys share a piece where that makes no cycle."""

    submesh: int
    stage: int | None
    backward: bool
    floating: bool


@dataclass(slots=True)
class _Joiner:
    """The state of the pass.

    `readers` has the equations that import a variable, `parts` the equations that a conditional was
    made of, all by serial.
    """

    builder: Builder
    place: Mapping[int, int]
    match: Mapping[int, Match]
    cloned: Cloned
    flow: Flow
    readers: dict[Var, set[int]] = field(default_factory=dict)
    parts: dict[int, set[int]] = field(default_factory=dict)

    def note_reads(self, equation: Equation) -> None:
        """Notes what an equation imports, if it belongs to a piece or task."""
        if equation.serial in self.flow.anchored:
            for var in self.flow.imports(equation):
                self.readers.setdefault(var, set()).add(equation.serial)

    def region(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """The steps of one region without guards."""
        opened = [
            replace(step, body=self.region(step.body), guards=step.guards)
            if isinstance(step, Loop)
            else step
            for step in steps
        ]
        return tuple(self._level(opened, 0))

    def _level(self, steps: Sequence[Step], depth: int) -> list[Step]:
        """The steps with all guards behind the first `depth` ones turned into conditionals."""
        members: dict[int, list[Step]] = {}
        guard_of: dict[int, Guard] = {}
        last: dict[int, int] = {}
        for position, step in enumerate(steps):
            guard = _guard_at(step, depth)
            if guard is not None:
                members.setdefault(guard.cond, []).append(step)
                guard_of[guard.cond] = guard
                last[guard.cond] = position
        ends = {position: cond for cond, position in last.items()}
        done: list[Step] = []
        for position, step in enumerate(steps):
            if _guard_at(step, depth) is None:
                done.append(step)
            if position in ends:
                cond = ends[position]
                done += self._conditional(guard_of[cond], members[cond], depth)
        return done

    def _conditional(self, guard: Guard, members: list[Step], depth: int) -> list[Step]:
        """The pieces of one conditional, in dataflow order."""
        inside: list[Step] = []
        for branch in range(len(guard.eqn.params["branches"])):
            own = [step for step in members if _branch(step, depth) == branch]
            inside += self._level(own, depth + 1)
        branch_of = {step.serial: _branch(step, depth) for step in inside}
        choices = [s for s in members if isinstance(s, Equation) and _branch(s, depth) is None]
        floating = [step for step in choices if step.serial in self.cloned.floating]
        region = region_of((*inside, *(s for s in choices if s not in floating)), self.flow)
        keys = self._keys(region)
        pieces: list[Step] = []
        for positions in split_acyclic(region, keys):
            steps = [region.steps[position] for position in positions]
            if isinstance(steps[0], Loop):
                pieces.append(replace(steps[0], guards=steps[0].guards[:depth]))
            else:
                found = [step for step in steps if isinstance(step, Equation)]
                pieces += self._piece(guard, found, branch_of, depth)
        if floating:
            pieces += self._piece(guard, floating, branch_of, depth)
        return pieces

    def _keys(self, region: Region) -> dict[int, _Key]:
        """The key of every equation; one without a match is in the stage of what it reads."""
        backward = backward_phase(region)
        stages: dict[int, int | None] = {}
        for position, step in enumerate(region.steps):
            match = self.match.get(step.serial)
            before = [p for p in region.operands[position] if self._together(region, p, position)]
            stages[position] = (
                match.stage
                if match is not None
                else next((s for p in reversed(before) if (s := stages[p]) is not None), None)
            )
        for position in reversed(range(len(region.steps))):
            after = [p for p in region.users[position] if self._together(region, position, p)]
            if stages[position] is None and region.steps[position].serial not in self.match:
                stages[position] = next((s for p in after if (s := stages[p]) is not None), None)
        return {
            position: _Key(
                self.place[step.serial],
                stages[position],
                backward[position],
                step.serial in self.cloned.floating,
            )
            for position, step in enumerate(region.steps)
            if isinstance(step, Equation)
        }

    def _together(self, region: Region, position: int, other: int) -> bool:
        first, second = region.steps[position], region.steps[other]
        if isinstance(first, Loop) or isinstance(second, Loop):
            return False
        return self.place[first.serial] == self.place[second.serial]

    # --- one piece ------------------------------------------------------------------------------

    def _piece(
        self,
        guard: Guard,
        steps: Sequence[Equation],
        branch_of: Mapping[int, int | None],
        depth: int,
    ) -> list[Step]:
        """The conditional of a piece; choices that stand alone stay as they are."""
        work = [step for step in steps if step.serial in branch_of]
        choices = [step for step in steps if step.serial not in branch_of]
        if not work and not any(self._is_bound(v, depth) for c in choices for v in c.inputs):
            return [replace(choice, chooses=None) for choice in choices]
        parts = set[int]().union(*(self.parts.get(s.serial, {s.serial}) for s in steps))
        results = {
            var: branch_of[step.serial]
            for step in work
            for var in step.outputs
            if var in self.flow.kept or self.readers.get(var, set()) - parts
        }
        outputs = (*results, *(choice.outputs[0] for choice in choices))
        branches: list[tuple[list[Equation], list[Operand]]] = []
        for branch in range(len(guard.eqn.params["branches"])):
            wanted: list[Operand] = []
            zeros: list[Equation] = []
            for var, made in results.items():
                wanted.append(var if made == branch else self._zeros(var, zeros))
            wanted += [choice.inputs[1 + branch] for choice in choices]
            own = [step for step in work if branch_of[step.serial] == branch]
            branches.append(([*self._with_clones(own, wanted, depth), *zeros], wanted))
        placed = [s for s in steps if s.serial not in self.cloned] or steps
        first = next((s for s in placed if s.serial in self.match), placed[0])
        self.parts[first.serial] = parts
        return [self._equation(guard, first, branches, outputs, depth, _scope(steps, first))]

    def _is_bound(self, operand: Operand, depth: int) -> bool:
        """Whether a value is made again by each of its users, inside a branch."""
        maker = None if isinstance(operand, Lit) else self.flow.maker.get(operand)
        return maker is not None and maker.serial in self.cloned and len(maker.guards) > depth

    def _zeros(self, var: Var, zeros: list[Equation]) -> Operand:
        aval = self.builder.avals[var]
        self.builder.steps = []
        (zero,) = self.builder.emit(lambda: empty(aval.shape, aval.dtype), [], _NO_SCOPE)
        zeros += [step for step in self.builder.steps if isinstance(step, Equation)]
        return zero

    def _with_clones(
        self, equations: Sequence[Equation], wanted: Sequence[Operand], depth: int
    ) -> list[Equation]:
        """The equations of a branch, each behind the clones that it reads."""
        made: set[Var] = set()
        ordered: list[Equation] = []

        def add(equation: Equation) -> None:
            todo = [equation]
            while todo:
                missing = (
                    self.flow.maker[v]
                    for v in todo[-1].inputs
                    if not isinstance(v, Lit) and v not in made and self._is_bound(v, depth)
                )
                clone = next(missing, None)
                if clone is not None:
                    todo.append(clone)
                    continue
                step = todo.pop()
                if not step.outputs or not made.issuperset(step.outputs):
                    ordered.append(step)
                    made.update(step.outputs)

        for equation in equations:
            add(equation)
        for operand in wanted:
            if (
                not isinstance(operand, Lit)
                and operand not in made
                and self._is_bound(operand, depth)
            ):
                add(self.flow.maker[operand])
        return ordered

    def _equation(
        self,
        guard: Guard,
        first: Equation,
        branches: Sequence[tuple[list[Equation], list[Operand]]],
        outputs: tuple[Var, ...],
        depth: int,
        scope: Scope,
    ) -> Equation:
        reads: dict[Var, None] = {}
        for equations, wanted in branches:
            made = {var for equation in equations for var in equation.outputs}
            operands = [*(v for equation in equations for v in equation.inputs), *wanted]
            reads |= {v: None for v in operands if not isinstance(v, Lit) and v not in made}
        inputs, avals = tuple(reads), self.builder.avals
        bodies = [make_body(equations, inputs, wanted, avals) for equations, wanted in branches]
        types = [avals[var] for var in outputs]
        index_aval = guard.index.aval if isinstance(guard.index, Lit) else avals[guard.index]
        operands = [index_aval, *(avals[var] for var in inputs)]
        return Equation(
            serial=first.serial,
            eqn=jaxprs.conditional(guard.eqn, operands, types, bodies),
            inputs=(guard.index, *inputs),
            outputs=outputs,
            scope=scope,
            guards=first.guards[:depth],
        )


_NO_SCOPE = Scope()


def _guard_at(step: Step, depth: int) -> Guard | None:
    """The guard of a step behind its first `depth` ones, or the conditional it chooses from."""
    if len(step.guards) > depth:
        return step.guards[depth]
    return step.chooses if isinstance(step, Equation) else None


def _branch(step: Step, depth: int) -> int | None:
    """The branch that a step stands in; None for a choice."""
    return step.guards[depth].branch if len(step.guards) > depth else None


def _scope(steps: Sequence[Equation], first: Equation) -> Scope:
    """The scope of `first`, backward when one of the steps is."""
    return replace(first.scope, transposes=max(step.scope.transposes for step in steps))
