"""Regroups sums whose terms lie on several submeshes: first within each submesh, then across.

    s = ((a@0 + b@1) + c@0) + d@1       ->      p = a + c @0 ; q = b + d @1 ; s = p + q

So a global norm sends one partial per submesh, and a tied gradient one array. In a loop, an
accumulator whose terms lie on several submeshes becomes one accumulator per submesh:

    loop acc = z: acc' = (acc + g@0) + h@1     ->    loop p = z, q = 0: p' = p + g ; q' = q + h
                                                     acc = p + q
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from multimesh._src.ir.flat import (
    Carry,
    Equation,
    FlatProgram,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    step_inputs,
)
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.assign.cloned import Cloned

_ADD = frozenset(("add", "add_any"))


@dataclass(slots=True)
class _Context:
    """Numbers and places while a program is rewritten."""

    avals: dict[Var, Any]
    place: dict[int, int]
    var_place: dict[Var, int]
    seeded: Mapping[int, int]
    cloned: Cloned
    next_serial: int
    uses: dict[Var, int] = field(default_factory=dict)

    def new_var(self, aval: Any) -> Var:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def serial(self) -> int:
        self.next_serial += 1
        return self.next_serial - 1


def regroup_sums(
    program: FlatProgram, place: Mapping[int, int], seeded: Mapping[int, int], cloned: Cloned
) -> tuple[FlatProgram, dict[int, int]]:
    """Returns the program with sums across submeshes regrouped, and the places of its equations.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
        seeded: Additions that are seeds stay as they are.
        cloned: Terms that are floating belong to any submesh.
    """
    context = _Context(
        dict(program.avals), dict(place), {}, seeded, cloned, max(place, default=-1) + 1
    )
    _count_uses(program.steps, program.results, context)
    _note_places(program.steps, context)
    steps = _rewrite(program.steps, context)
    return replace(program, avals=context.avals, steps=steps), context.place


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What a loop adds up: the serials of its additions, and the terms made in the loop."""

    additions: tuple[int, ...]
    terms: tuple[Var, ...]


def find_accumulations(
    program: FlatProgram, seeded: Mapping[int, int], cloned: Cloned
) -> tuple[Accumulation, ...]:
    """Finds the sums whose terms never cross in a loop: each submesh has an accumulator."""
    context = _Context(dict(program.avals), {}, {}, seeded, cloned, 0)
    _count_uses(program.steps, program.results, context)
    found: list[Accumulation] = []

    def visit(steps: tuple[Step, ...]) -> None:
        for loop in (step for step in steps if isinstance(step, Loop)):
            visit(loop.body)
            made_by = {v: s for s in loop.body if isinstance(s, Equation) for v in s.outputs}
            for carry in loop.carries:
                accumulation = _accumulation(carry, made_by, context)
                if accumulation is not None:
                    root, terms, inner = accumulation
                    made = tuple(v for v in terms if not isinstance(v, Lit) and v in made_by)
                    additions = (root.serial, *(equation.serial for equation in inner))
                    found.append(Accumulation(additions, made))

    visit(program.steps)
    return tuple(found)


def _count_uses(steps: tuple[Step, ...], results: tuple[Operand, ...], context: _Context) -> None:
    for operand in results:
        if not isinstance(operand, Lit):
            context.uses[operand] = context.uses.get(operand, 0) + 2  # a result stays as it is
    for step in steps:
        for operand in step_inputs(step):
            if not isinstance(operand, Lit):
                weight = 1 if isinstance(step, Equation) else 2
                context.uses[operand] = context.uses.get(operand, 0) + weight
        if isinstance(step, Loop):
            _count_uses(step.body, tuple(carry.next for carry in step.carries), context)
        context.next_serial = max(context.next_serial, step.serial + 1)


def _note_places(steps: tuple[Step, ...], context: _Context) -> None:
    for step in steps:
        if isinstance(step, Loop):
            _note_places(step.body, context)
            for carry in step.carries:
                if not isinstance(carry.next, Lit) and carry.next in context.var_place:
                    context.var_place[carry.result] = context.var_place[carry.next]
        elif step.serial in context.place and step.serial not in context.cloned.floating:
            context.var_place.update(dict.fromkeys(step.outputs, context.place[step.serial]))


def _rewrite(steps: tuple[Step, ...], context: _Context) -> tuple[Step, ...]:
    split: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            loop, zeros, totals = _split_accumulators(step, context)
            body = _rewrite(loop.body, context)
            split += [*zeros, replace(loop, body=body), *totals]
        else:
            split.append(step)
    return _regroup_level(tuple(split), context)


# --- sums -----------------------------------------------------------------------------------------


def _is_sum(step: Step, context: _Context) -> bool:
    return (
        isinstance(step, Equation)
        and step.primitive in _ADD
        and step.serial not in context.seeded
        and step.serial not in context.cloned
    )


def _terms(
    root: Equation, made_by: Mapping[Var, Equation], context: _Context
) -> tuple[list[Operand], list[Equation]]:
    """The terms of a sum and the additions inside it, whose results nothing else reads."""
    terms: list[Operand] = []
    inner: list[Equation] = []
    todo = list(reversed(root.inputs))
    while todo:  # no recursion: a norm of a large state has a thousand terms in a row
        operand = todo.pop()
        maker = None if isinstance(operand, Lit) else made_by.get(operand)
        if maker is None or not _is_sum(maker, context) or _num_uses(maker, context) != 1:
            terms.append(operand)
        else:
            inner.append(maker)
            todo += reversed(maker.inputs)
    return terms, inner


def _num_uses(equation: Equation, context: _Context) -> int:
    return context.uses.get(equation.outputs[0], 0)


def _regroup_level(steps: tuple[Step, ...], context: _Context) -> tuple[Step, ...]:
    made_by = {v: s for s in steps if isinstance(s, Equation) for v in s.outputs}
    replaced: dict[int, list[Equation]] = {}
    inside: set[int] = set()
    for step in reversed(steps):
        if not isinstance(step, Equation) or step.serial in inside or not _is_sum(step, context):
            continue
        terms, inner = _terms(step, made_by, context)
        inside |= {equation.serial for equation in inner}
        groups = _by_place(terms, context)
        if len(groups) > 1 and any(len(group) > 1 for group in groups.values()):
            replaced[step.serial] = _regrouped(step, groups, context)
            replaced |= {equation.serial: [] for equation in inner}
    return tuple(
        new
        for step in steps
        for new in (replaced.get(step.serial, [step]) if isinstance(step, Equation) else [step])
    )


def _by_place(terms: list[Operand], context: _Context) -> dict[int, list[Operand]]:
    """Terms by submesh, in order; terms without one join the first submesh."""
    groups: dict[int, list[Operand]] = {}
    loose: list[Operand] = []
    for term in terms:
        place = None if isinstance(term, Lit) else context.var_place.get(term)
        if place is None:
            loose.append(term)
        else:
            groups.setdefault(place, []).append(term)
    if loose and groups:
        first = next(iter(groups))
        groups[first] += loose  # behind: a literal has no shape of its own
    return groups


def _regrouped(
    root: Equation, groups: Mapping[int, list[Operand]], context: _Context
) -> list[Equation]:
    """Partial sums where their terms lie, then their sum where the whole one was to be made."""
    equations: list[Equation] = []
    partials: list[Operand] = []
    here = context.place[root.serial]
    for place, terms in sorted(groups.items(), key=lambda item: item[0] == here):
        partials.append(_sum(root, terms, place, equations, context))
    _sum(root, partials, here, equations, context, output=root.outputs[0])
    return equations


def _sum(
    like: Equation,
    terms: list[Operand],
    place: int,
    equations: list[Equation],
    context: _Context,
    output: Var | None = None,
) -> Operand:
    total = terms[0]
    for position, term in enumerate(terms[1:], 2):
        last = position == len(terms) and output is not None
        var = output if last and output is not None else context.new_var(_aval(like, context))
        equation = replace(like, serial=context.serial(), inputs=(total, term), outputs=(var,))
        context.place[equation.serial] = place
        context.var_place[var] = place
        equations.append(equation)
        total = var
    return total


def _aval(equation: Equation, context: _Context) -> Any:
    return context.avals[equation.outputs[0]]


# --- accumulators ---------------------------------------------------------------------------------


def _split_accumulators(
    loop: Loop, context: _Context
) -> tuple[Loop, list[Equation], list[Equation]]:
    """The loop with one accumulator per submesh, and the equations that make zeros and totals."""
    made_by = {v: s for s in loop.body if isinstance(s, Equation) for v in s.outputs}
    carries: list[Carry] = []
    body = list(loop.body)
    zeros: list[Equation] = []
    totals: list[Equation] = []
    for carry in loop.carries:
        carries += _split_accumulator(carry, made_by, body, zeros, totals, context)
    return replace(loop, carries=tuple(carries), body=tuple(body)), zeros, totals


def _split_accumulator(
    carry: Carry,
    made_by: Mapping[Var, Equation],
    body: list[Step],
    zeros: list[Equation],
    totals: list[Equation],
    context: _Context,
) -> list[Carry]:
    accumulation = _accumulation(carry, made_by, context)
    if accumulation is None:
        return [carry]
    root, terms, inner = accumulation
    groups = _by_place(terms, context)
    if not groups or (len(groups) == 1 and carry.inside in root.inputs):
        return [carry]
    gone = {equation.serial for equation in (root, *inner)}
    position = body.index(root)
    here = (
        context.place[root.serial] if context.place[root.serial] in groups else next(iter(groups))
    )
    carries: list[Carry] = []
    additions: list[Equation] = []
    for place, group in sorted(groups.items(), key=lambda item: item[0] != here):
        aval = _aval(root, context)
        inside = context.new_var(aval)
        result = carry.result if len(groups) == 1 else context.new_var(aval)
        init = carry.init if place == here else _zeros(root, place, zeros, context)
        # one addition to the accumulator: over two tasks it would keep iterations in order
        added = _sum(root, group, place, additions, context)
        next_ = _sum(root, [inside, added], place, additions, context)
        context.var_place[result] = place
        carries.append(Carry(init, inside, next_, result))
    if len(groups) > 1:
        _sum(root, [c.result for c in carries], here, totals, context, output=carry.result)
    body[position + 1 : position + 1] = additions
    body[:] = [step for step in body if step.serial not in gone]
    return carries


def _accumulation(
    carry: Carry, made_by: Mapping[Var, Equation], context: _Context
) -> tuple[Equation, list[Operand], list[Equation]] | None:
    """The addition behind an accumulator, what it adds to it, and the additions among that."""
    root = None if isinstance(carry.next, Lit) else made_by.get(carry.next)
    if root is None or not _is_sum(root, context) or _num_uses(root, context) != 2:
        return None
    terms, inner = _terms(root, made_by, context)
    if terms.count(carry.inside) != 1 or context.uses.get(carry.inside) != 1:
        return None
    terms.remove(carry.inside)
    return root, terms, inner


def _zeros(like: Equation, place: int, zeros: list[Equation], context: _Context) -> Operand:
    aval = _aval(like, context)
    if aval.ndim == 0:
        return Lit(np.zeros((), aval.dtype), aval)
    closed = jax.make_jaxpr(lambda: lax.full(aval.shape, 0, aval.dtype))()
    eqn: Any = jaxprs.open_jaxpr(closed).eqns[0]
    var = context.new_var(aval)
    inputs = tuple(Lit(atom.val, atom.aval) for atom in eqn.invars)
    equation = Equation(
        context.serial(),
        eqn,
        inputs,
        (var,),
        like.scope,
        guards=like.guards,
        callers=(like.eqn, *like.callers),
        emitted=True,
    )
    context.place[equation.serial] = place
    zeros.append(equation)
    return var
