"""Computes random keys once per submesh, not once per task.

    with layer0: bits(fold_in(key, 0))              layer0: bits(k0)    k0 = fold_in(key, 0) @0
    with layer1: bits(fold_in(key, 1))      ->      layer1: bits(k1)    k1 = fold_in(key, 1) @0
    with layer2: bits(fold_in(key, 2))              layer2: bits(k2)    k2 = fold_in(key, 2) @1

Equations that are cloned cost little, but they make the bodies of equal layers unlike: each would
be compiled for itself, and the i-th layer of a chain of splits would hold i of them. So where
several tasks of a submesh read small values that are derived from random keys, these become
equations with a place, in a task of their own, and the other tasks take them as inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multimesh._src.frontend.matching import Match
from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    all_equations,
)
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.assign.cloned import RANDOM_WEIGHT, Cloned
from multimesh._src.partition.inline import last_serial


def share_keys(
    program: FlatProgram,
    place: Mapping[int, int],
    match: Mapping[int, Match],
    cloned: Cloned,
    submeshes: Sequence[Submesh],
    max_elements: int,
) -> tuple[FlatProgram, dict[int, int], Cloned]:
    """Returns the program, the places and the clones with keys computed once per submesh.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
        match: Match of each seed, by serial.
        cloned: What tasks clone.
        submeshes: All submeshes; nothing is computed ahead on rotating ones.
        max_elements: The largest size of a value that is shared.
    """
    maker = {v: e for e in all_equations(program.steps) for v in e.outputs}
    keys = _Keys(program.avals, maker, cloned, max(1, max_elements))
    readers: dict[int, dict[str, None]] = {}
    reads: dict[int, int] = {}
    for equation in all_equations(program.steps):
        if equation.serial in cloned or equation.serial not in place:
            continue
        here = place[equation.serial]
        if not submeshes[here].rotation and any(map(keys.leads_to, equation.inputs)):
            reads[equation.serial] = here
            if equation.serial in match:
                readers.setdefault(here, {})[match[equation.serial].name] = None
    shared = {here for here, names in readers.items() if len(names) > 1}
    reads = {serial: here for serial, here in reads.items() if here in shared}
    if not reads:
        return program, dict(place), cloned
    copier = _Copier(keys, dict(program.avals), last_serial(program.steps) + 1)
    rewritten = {
        e.serial: replace(e, inputs=tuple(copier.own(v, reads[e.serial]) for v in e.inputs))
        for e in all_equations(program.steps)
        if e.serial in reads
    }
    return (
        replace(program, avals=copier.avals, steps=copier.steps(program.steps, rewritten)),
        {**place, **copier.place},
        replace(
            cloned,
            floating=cloned.floating | copier.floating,
            variables={**cloned.variables, **copier.costs},
            shared=frozenset(copier.place),
        ),
    )


@dataclass(slots=True)
class _Keys:
    """Knows which floating variables are keys, and what is made of them."""

    avals: Mapping[Var, Any]
    maker: Mapping[Var, Equation]
    cloned: Cloned
    max_elements: int
    _leads: dict[Var, bool] = field(default_factory=dict)

    def is_key(self, var: Var) -> bool:
        """Whether a variable is small, and as dear as a random word: a key, hardly ever else."""
        dear = self.cloned.variables.get(var, 0) >= RANDOM_WEIGHT
        return dear and var in self.maker and self.avals[var].size <= self.max_elements

    def leads_to(self, operand: Operand) -> bool:
        """Whether a variable is a key, or floating and made of one."""
        if isinstance(operand, Lit) or operand not in self.cloned.variables:
            return False
        todo = [operand]
        while todo:  # no recursion: chains of keys are long
            var = todo[-1]
            maker = self.maker.get(var)
            if var in self._leads:
                todo.pop()
                continue
            if maker is None or maker.serial not in self.cloned.floating or self.is_key(var):
                self._leads[var] = self.is_key(var)
                continue
            inputs = [v for v in maker.inputs if not isinstance(v, Lit)]
            unknown = [v for v in inputs if v not in self._leads]
            todo += unknown
            if not unknown:
                self._leads[var] = any(self._leads[v] for v in inputs)
        return self._leads[operand]


@dataclass(slots=True)
class _Copier:
    """Makes the copies of keys, and of what is cloned behind them, for each submesh."""

    keys: _Keys
    avals: dict[Var, Any]
    num_steps: int
    place: dict[int, int] = field(default_factory=dict)
    costs: dict[Var, int] = field(default_factory=dict)
    copies: dict[tuple[int, int], Equation] = field(default_factory=dict)  # (serial, submesh)

    @property
    def floating(self) -> frozenset[int]:
        """Serials of the copies that tasks clone."""
        made = {equation.serial for equation in self.copies.values()}
        return frozenset(made - self.place.keys())

    def own(self, operand: Operand, here: int) -> Operand:
        """What stands for a variable on a submesh."""
        if not self.keys.leads_to(operand):
            return operand
        assert not isinstance(operand, Lit)
        todo = [self.keys.maker[operand]]
        while todo:  # no recursion: chains of keys are long
            maker = todo[-1]
            if (maker.serial, here) in self.copies:
                todo.pop()
                continue
            before = [
                self.keys.maker[v]
                for v in maker.inputs
                if not isinstance(v, Lit) and self.keys.leads_to(v)
            ]
            missing = [m for m in before if (m.serial, here) not in self.copies]
            todo += missing
            if not missing:
                self._copy(maker, here)
        return self._copied(operand, here)

    def _copied(self, operand: Operand, here: int) -> Operand:
        if isinstance(operand, Lit) or not self.keys.leads_to(operand):
            return operand
        maker = self.keys.maker[operand]
        return self.copies[maker.serial, here].outputs[maker.outputs.index(operand)]

    def _copy(self, equation: Equation, here: int) -> None:
        outputs = range(len(self.avals), len(self.avals) + len(equation.outputs))
        for var, new in zip(equation.outputs, outputs, strict=True):
            self.avals[new] = self.avals[var]
        inputs = tuple(self._copied(v, here) for v in equation.inputs)
        copy = replace(equation, serial=self.num_steps, inputs=inputs, outputs=tuple(outputs))
        self.num_steps += 1
        self.copies[equation.serial, here] = copy
        if any(map(self.keys.is_key, equation.outputs)):
            self.place[copy.serial] = here
        else:
            costs = self.keys.cloned.variables
            self.costs.update(zip(outputs, map(costs.__getitem__, equation.outputs), strict=True))

    def steps(self, steps: tuple[Step, ...], rewritten: Mapping[int, Equation]) -> tuple[Step, ...]:
        """The program with the copies behind what they copy."""
        behind: dict[int, list[Equation]] = {}
        for (serial, _), copy in self.copies.items():
            behind.setdefault(serial, []).append(copy)

        def walk(steps: tuple[Step, ...]) -> Iterator[Step]:
            for step in steps:
                if isinstance(step, Loop):
                    yield replace(step, body=tuple(walk(step.body)))
                else:
                    yield rewritten.get(step.serial, step)
                    yield from behind.get(step.serial, ())

        return tuple(walk(steps))
