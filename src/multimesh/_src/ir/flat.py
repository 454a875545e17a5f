"""The flat program: the traced function as one list of equations over numbered variables.

Inner jits are inlined and every equation carries its whole scope. Loops whose body has to be cut
(`Loop`) are the only nesting; their bodies read variables of the enclosing program directly, so a
loop has no list of constants. What `lax.scan` calls `xs` and `ys` is written out: a slice at the
loop index, and a carried stack that is written at the loop index.

The branches of a conditional that has to be cut stand one after the other, every step in them
under a *guard*; behind them, each result is *chosen* from what the branches give for it. Until
`partition.branches` makes conditionals of them again, a variable made under a guard has a value
only where that guard holds.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat.name_stack import source_line

Var: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Lit:
    """A literal operand: a Python or numpy scalar with its type."""

    value: Any
    aval: Any


Operand: TypeAlias = Var | Lit


@dataclass(frozen=True, slots=True)
class Guard:
    """A branch of a conditional: what stands in it runs when `index` is `branch`.

    `cond` is a serial of its own, `eqn` the JAX equation of the whole conditional.
    """

    cond: int
    index: Operand
    branch: int
    eqn: Any = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Equation:
    """One JAX equation on our variables; the variables of `eqn` itself are ignored.

    `serial` is unique within the program and survives passes, so that analyses can name it.
    `guards` are the branches around it, outermost first. `chooses` says that it is a `select_n` of
    what the branches of this conditional give (the guard's own branch means nothing then).
    `callers` are the calls and scans around it that were opened, the innermost first; `emitted`
    says that a pass made the equation for the innermost of them.
    """

    serial: int
    eqn: Any  # jax.extend.core.JaxprEqn
    inputs: tuple[Operand, ...]
    outputs: tuple[Var, ...]
    scope: Scope
    guards: tuple[Guard, ...] = ()
    chooses: Guard | None = None
    callers: tuple[Any, ...] = field(default=(), repr=False)
    emitted: bool = False

    @property
    def line(self) -> str:
        """The user's `file:line`; in jits of JAX's own, whose equations have none, the caller's."""
        known = self.callers if self.emitted else (self.eqn, *self.callers)
        lines = (source_line(eqn) for eqn in known)
        return next((line for line in lines if line), "")

    @property
    def primitive(self) -> str:
        """Name of the JAX primitive."""
        return self.eqn.primitive.name


@dataclass(frozen=True, slots=True)
class Carry:
    """A value that a loop carries: `inside` is `init` at first, then `next`; `result` at last."""

    init: Operand
    inside: Var
    next: Operand
    result: Var


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop whose body is cut into tasks.

    `index` is an int32 scalar that counts 0, 1, ... `length` - 1 in order of execution.
    `marker` is the scope component of `microbatch`, empty for a loop written by hand.
    A `while` has a `condition`: the value inside of a carry, read before each iteration; the loop
    ends when it is false. Its `length` is 0, and nothing reads its `index`.
    """

    serial: int
    length: int
    index: Var
    carries: tuple[Carry, ...]
    body: tuple["Step", ...]
    scope: Scope
    marker: str = ""
    guards: tuple[Guard, ...] = ()
    condition: Var | None = None

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The results of the loop, one per carry."""
        return tuple(carry.result for carry in self.carries)


Step: TypeAlias = Equation | Loop


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """The whole program. `avals` gives every variable's type.

    `constants` are closed-over arrays.
    """

    name: str
    avals: Mapping[Var, Any]
    arguments: tuple[Var, ...]
    constants: Mapping[Var, Any]
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]


def free_variables(steps: tuple[Step, ...]) -> tuple[Var, ...]:
    """Variables that `steps` read and do not make, in order of first use."""
    made: set[Var] = set()
    read: dict[Var, None] = {}
    for step in steps:
        for operand in step_inputs(step):
            if not isinstance(operand, Lit) and operand not in made:
                read[operand] = None
        made.update(step.outputs)
    return tuple(read)


def step_inputs(step: Step) -> tuple[Operand, ...]:
    """Operands of a step, those of its guards included.

    For a loop its initial values and what its body reads from outside.
    """
    match step:
        case Equation():
            return (*step.inputs, *(guard.index for guard in step.guards))
        case Loop():
            inside = {step.index, *(carry.inside for carry in step.carries)}
            known = inside.union(*(inner.outputs for inner in step.body))
            reads = [var for var in free_variables(step.body) if var not in inside]
            nexts = [
                carry.next
                for carry in step.carries
                if not isinstance(carry.next, Lit) and carry.next not in known
            ]
            return (*(carry.init for carry in step.carries), *reads, *nexts)


def all_equations(steps: tuple[Step, ...]) -> Iterator[Equation]:
    """Every equation at any depth, in program order."""
    for step in steps:
        if isinstance(step, Loop):
            yield from all_equations(step.body)
        else:
            yield step


def all_with_trip_counts(steps: tuple[Step, ...]) -> Iterator[tuple[Equation, int]]:
    """Every equation with the trip count of the innermost loop around it, 0 outside of loops."""

    def walk(steps: tuple[Step, ...], length: int) -> Iterator[tuple[Equation, int]]:
        for step in steps:
            if isinstance(step, Loop):
                yield from walk(step.body, step.length)
            else:
                yield step, length

    return walk(steps, 0)


def substitute(steps: tuple[Step, ...], new: Mapping[Var, Operand]) -> tuple[Step, ...]:
    """Replaces variables that `steps` read, at any depth."""

    def look(operand: Operand) -> Operand:
        return operand if isinstance(operand, Lit) else new.get(operand, operand)

    def look_guards(guards: tuple[Guard, ...]) -> tuple[Guard, ...]:
        return tuple(replace(guard, index=look(guard.index)) for guard in guards)

    def rewrite(step: Step) -> Step:
        match step:
            case Equation():
                if not any(v in new for v in step_inputs(step) if not isinstance(v, Lit)):
                    return step
                guards = look_guards(step.guards)
                return replace(step, inputs=tuple(map(look, step.inputs)), guards=guards)
            case Loop():
                carries = tuple(
                    replace(carry, init=look(carry.init), next=look(carry.next))
                    for carry in step.carries
                )
                body = substitute(step.body, new)
                return replace(step, carries=carries, body=body, guards=look_guards(step.guards))

    return tuple(map(rewrite, steps)) if new else steps


def producers(steps: Iterable[Step]) -> dict[Var, Step]:
    """The step that makes each variable, at this level only."""
    return {var: step for step in steps for var in step.outputs}
