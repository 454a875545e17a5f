"""What each region (the outer program, or a loop body) reads and makes, with clones looked through.

A task never imports the result of a cloned equation: it imports what the clone reads. So the users
of a variable are the placed steps behind any chain of clones.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Step, Var
from multimesh._src.partition.assign.cloned import Cloned
from multimesh._src.partition.effects import ordered_kinds


@dataclass(frozen=True, slots=True)
class Flow:
    """Dataflow of the whole program.

    Attributes:
        maker: The equation that makes a variable; loops, arguments and constants have none.
        anchored: Serials of the equations that belong to a task: all that are not cloned, and the
            clones whose results the program, a loop or a carry needs as values.
        kept: Variables needed as values by results, carries and loops.
    """

    maker: Mapping[Var, Equation]
    anchored: frozenset[int]
    kept: frozenset[Var]
    cloned: Cloned

    def sources(self, var: Var) -> tuple[Var, ...]:
        """The variables that a task imports in order to have `var`."""
        found: dict[Var, None] = {}
        todo, seen = [var], {var}
        while todo:
            current = todo.pop()
            maker = self.maker.get(current)
            if maker is None or maker.serial not in self.cloned:
                found[current] = None
                continue
            reads = [v for v in maker.inputs if not isinstance(v, Lit) and v not in seen]
            seen.update(reads)
            todo += reads
        return tuple(found)

    def imports(self, step: Step) -> tuple[Var, ...]:
        """The variables that a step imports: through clones for equations and loop bodies alike."""
        if isinstance(step, Loop):
            inits = [carry.init for carry in step.carries if not isinstance(carry.init, Lit)]
            return tuple(dict.fromkeys((*inits, *self._body_imports(step))))
        reads = [v for v in step.inputs if not isinstance(v, Lit)]
        return tuple(dict.fromkeys(s for v in reads for s in self.sources(v)))

    def _body_imports(self, loop: Loop) -> Iterator[Var]:
        known = {loop.index, *(carry.inside for carry in loop.carries)}
        known.update(var for step in loop.body for var in step.outputs)
        for step in loop.body:
            if isinstance(step, Loop) or step.serial in self.anchored:
                yield from (v for v in self.imports(step) if v not in known)
        for carry in loop.carries:
            if not isinstance(carry.next, Lit) and carry.next not in known:
                yield carry.next


def analyze_flow(program: FlatProgram, cloned: Cloned) -> Flow:
    """Finds makers, kept variables and the equations that belong to tasks."""
    maker: dict[Var, Equation] = {}
    kept: dict[Var, None] = {v: None for v in program.results if not isinstance(v, Lit)}
    anchored: set[int] = set()

    def visit(steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Loop):
                ends = [end for carry in step.carries for end in (carry.init, carry.next)]
                kept.update(dict.fromkeys(v for v in ends if not isinstance(v, Lit)))
                visit(step.body)
            else:
                maker.update(dict.fromkeys(step.outputs, step))

    visit(program.steps)
    for step in maker.values():
        if step.serial not in cloned or any(var in kept for var in step.outputs):
            anchored.add(step.serial)
    anchored |= _without_outputs(program.steps)
    return Flow(maker, frozenset(anchored), frozenset(kept), cloned)


def _without_outputs(steps: tuple[Step, ...]) -> set[int]:
    """Equations that are run for their effect alone."""
    found: set[int] = set()
    for step in steps:
        if isinstance(step, Loop):
            found |= _without_outputs(step.body)
        elif not step.outputs:
            found.add(step.serial)
    return found


@dataclass(slots=True)
class Region:
    """The steps of one region that belong to tasks, and who reads what among them.

    `users[i]` are the positions of the steps that import something that step i makes, `later[i]`
    those whose ordered effect comes next after that of step i.
    """

    steps: list[Step] = field(default_factory=list)
    users: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    operands: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    later: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def region_of(steps: tuple[Step, ...], flow: Flow) -> Region:
    """Builds the region of some steps at one level."""
    region = Region()
    made_at: dict[Var, int] = {}
    last_effect: dict[str, int] = {}
    for step in steps:
        if not isinstance(step, Loop) and step.serial not in flow.anchored:
            continue
        position = len(region.steps)
        region.steps.append(step)
        made = dict.fromkeys(made_at[var] for var in flow.imports(step) if var in made_at)
        region.operands[position] += made
        for operand in made:
            region.users[operand].append(position)
        made_at.update(dict.fromkeys(step.outputs, position))
        for kind in ordered_kinds(step):
            if kind in last_effect:
                region.later[last_effect[kind]].append(position)
            last_effect[kind] = position
    return region
