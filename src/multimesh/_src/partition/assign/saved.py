"""Uses what the forward pass has sent, where a remat region would send it again (DESIGN R20).

    y = layer0(x)  @0 ; z = layer1(y)  @1             forward
    y' = layer0(x) @0 ; z' = layer1(y') @1  ^T   ->   y' = layer0(x) @0 ; z' = layer1(y) @1  ^T

A remat region that spans submeshes is cut at them: each part is recomputed by its own backward
task, from the crossing value that the forward task made. Otherwise the backward of the last stage
would wait for a recomputation on the first.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Operand, Step, Var
from multimesh._src.partition.dedupe import hashable
from multimesh._src.partition.prune import has_effect


@dataclass(slots=True)
class _Saved:
    """Equal values: of each variable the first one, and the equations that make first ones."""

    place: Mapping[int, int]
    first: dict[Hashable, Equation] = field(default_factory=dict)
    equal: dict[Var, Var] = field(default_factory=dict)
    sender: dict[Var, int] = field(default_factory=dict)  # place of a recomputed variable

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
        self._note(equation)
        here = self.place.get(equation.serial)

        def saved(operand: Operand) -> Operand:
            if isinstance(operand, Lit) or self.sender.get(operand, here) == here:
                return operand
            return self.equal[operand]

        inputs = tuple(map(saved, equation.inputs))
        return equation if inputs == equation.inputs else replace(equation, inputs=inputs)

    def _note(self, equation: Equation) -> None:
        if has_effect(equation):
            return
        first = self.first.setdefault(self._key(equation), equation)
        if first is equation:
            return
        pairs = zip(equation.outputs, first.outputs, strict=True)
        self.equal |= {var: self.equal.get(same, same) for var, same in pairs}
        if first.scope.transposes < equation.scope.transposes and equation.serial in self.place:
            self.sender |= dict.fromkeys(equation.outputs, self.place[equation.serial])

    def _key(self, equation: Equation) -> Hashable:
        def value(operand: Operand) -> Hashable:
            if isinstance(operand, Lit):
                return hashable(np.asarray(operand.value)), operand.aval
            return self.equal.get(operand, operand)

        params = tuple((name, hashable(v)) for name, v in sorted(equation.eqn.params.items()))
        guards = tuple((value(guard.index), guard.branch) for guard in equation.guards)
        return equation.eqn.primitive, params, tuple(map(value, equation.inputs)), guards


def use_saved(program: FlatProgram, place: Mapping[int, int]) -> FlatProgram:
    """Returns `program` with recomputed values that cross submeshes replaced by the saved ones.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
    """
    return replace(program, steps=_Saved(place).steps(program.steps))
