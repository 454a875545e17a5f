"""Uses what the forward pass has sent, where a remat region would send it again (DESIGN R20).

    y = layer0(x)  @0 ; z = layer1(y)  @1             forward
    y' = layer0(x) @0 ; z' = layer1(y') @1  ^T   ->   y' = layer0(x) @0 ; z' = layer1(y) @1  ^T

A remat region that spans submeshes is cut at them, and at the stages that the user gives: each part
is recomputed by its own backward task, from the crossing value that the forward task made.
Otherwise the backward of the last stage would wait for a recomputation on the first.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from multimesh._src.frontend.matching import Match
from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Guard,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
)
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.dedupe import hashable
from multimesh._src.partition.prune import has_effect
from multimesh._src.partition.remat import without_calls

_Spot = tuple[int | None, int | None]
"""A submesh and a stage."""


@dataclass(slots=True)
class _Saved:
    """Equal values: of each variable the first one, and how often the first ones are transposed."""

    place: Mapping[int, int]
    stage: Mapping[int, int | None]
    first: dict[Hashable, tuple[Var, int]] = field(default_factory=dict)
    equal: dict[Var, Var] = field(default_factory=dict)
    made_at: dict[Var, _Spot] = field(default_factory=dict)
    order: dict[Var, int] = field(default_factory=dict)  # in which variables are made
    sender: dict[Var, _Spot] = field(default_factory=dict)  # where a variable is recomputed

    def steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            self.loop(step) if isinstance(step, Loop) else self.equation(step) for step in steps
        )

    def loop(self, loop: Loop) -> Loop:
        outside = dict(self.first)
        body = self.steps(loop.body)
        self.first = outside  # what the body makes is not known behind it
        return replace(loop, body=body)

    def equation(self, equation: Equation) -> Equation:
        here = self._spot(equation)
        self._note(equation)
        here = next((self.made_at[output] for output in equation.outputs), here)

        def saved(operand: Operand) -> Operand:
            if isinstance(operand, Lit) or not _apart(self.sender.get(operand, here), here):
                return operand
            return self.equal[operand]

        inputs = tuple(map(saved, equation.inputs))
        return equation if inputs == equation.inputs else replace(equation, inputs=inputs)

    def _spot(self, equation: Equation) -> _Spot:
        """Where an equation runs; without a stage of its own, in that of its operand made last."""
        here, stage = self.place.get(equation.serial), self.stage.get(equation.serial)
        if stage is None:
            reads = (v for v in equation.inputs if not isinstance(v, Lit) and v in self.made_at)
            near = [
                v for v in reads if self.made_at[v][0] == here and self.made_at[v][1] is not None
            ]
            last = max(near, key=self.order.__getitem__, default=None)
            stage = None if last is None else self.made_at[last][1]
        self.made_at.update(dict.fromkeys(equation.outputs, (here, stage)))
        self.order.update(dict.fromkeys(equation.outputs, len(self.order)))
        return here, stage

    def _note(self, equation: Equation) -> None:
        if has_effect(equation):
            return
        for output, key in zip(equation.outputs, self._keys(equation), strict=True):
            first, transposes = self.first.setdefault(key, (output, equation.scope.transposes))
            if first == output:
                continue
            self.equal[output] = self.equal.get(first, first)
            if transposes < equation.scope.transposes and equation.serial in self.place:
                self.made_at[output] = self.sender[output] = (
                    self.place[equation.serial],
                    self.made_at[first][1],
                )

    def _keys(self, equation: Equation) -> list[Hashable]:
        """For each output a value that equal outputs share.

        Of control flow autodiff makes other equations, which give residuals too and hold no remat
        regions and no custom derivatives: only the part that makes an output counts.
        """
        eqn, numbers = equation.eqn, range(len(equation.outputs))
        if not jaxprs.sub_jaxprs(eqn.params):
            whole = self._key(eqn, equation.inputs, equation.guards)
            return [(whole, k) for k in numbers]
        keys: list[Hashable] = []
        for k in numbers:
            part = jaxprs.part_for(eqn, [k])
            if part is None:
                keys.append(("passed on", equation.serial, k))
            else:
                inputs = [equation.inputs[position] for position in part.operands]
                key = self._key(without_calls(part.eqn), inputs, equation.guards)
                keys.append((key, part.outputs.index(k)))  # a part may have to make more than one
        return keys

    def _key(self, eqn: Any, inputs: Sequence[Operand], guards: Sequence[Guard]) -> Hashable:
        def value(operand: Operand) -> Hashable:
            if isinstance(operand, Lit):
                return hashable(np.asarray(operand.value)), operand.aval
            return self.equal.get(operand, operand)

        params = tuple(
            (name, hashable(param))
            for name, param in sorted(jaxprs.params_without_trees(eqn).items())
        )
        around = tuple((value(guard.index), guard.branch) for guard in guards)
        return eqn.primitive, params, tuple(map(value, inputs)), around


def _apart(one: _Spot, other: _Spot) -> bool:
    """Whether what is made at one spot is sent to another; no stage fits all."""
    stages = {one[1], other[1]} - {None}
    return one[0] != other[0] or len(stages) > 1


def use_saved(
    program: FlatProgram, place: Mapping[int, int], match: Mapping[int, Match]
) -> FlatProgram:
    """Returns `program` with recomputed values that cross replaced by the saved ones.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
        match: Match of each seed, by serial.
    """
    stage = {serial: found.stage for serial, found in match.items()}
    return replace(program, steps=_Saved(place, stage).steps(program.steps))
