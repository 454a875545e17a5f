"""Uses what the forward pass has sent, where a remat region would send it again (DESIGN R20).

    y = layer0(x)  @0 ; z = layer1(y)  @1             forward
    y' = layer0(x) @0 ; z' = layer1(y') @1  ^T   ->   y' = layer0(x) @0 ; z' = layer1(y) @1  ^T

A remat region that spans submeshes is cut at them: each part is recomputed by its own backward
task, from the crossing value that the forward task made. Otherwise the backward of the last stage
would wait for a recomputation on the first.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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


@dataclass(slots=True)
class _Saved:
    """Equal values: of each variable the first one, and how often the first ones are transposed."""

    place: Mapping[int, int]
    first: dict[Hashable, tuple[Var, int]] = field(default_factory=dict)
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
        for output, key in zip(equation.outputs, self._keys(equation), strict=True):
            first, transposes = self.first.setdefault(key, (output, equation.scope.transposes))
            if first == output:
                continue
            self.equal[output] = self.equal.get(first, first)
            if transposes < equation.scope.transposes and equation.serial in self.place:
                self.sender[output] = self.place[equation.serial]

    def _keys(self, equation: Equation) -> list[Hashable]:
        """For each output a value that equal outputs share.

        Of control flow autodiff makes other equations, which give residuals too: only the part that
        makes an output counts.
        """
        eqn, numbers = equation.eqn, range(len(equation.outputs))
        if not jaxprs.sub_jaxprs(eqn.params):
            whole = self._key(eqn, equation.inputs, equation.guards)
            return [(whole, k) for k in numbers]
        keys: list[Hashable] = []
        for k in numbers:
            part = jaxprs.for_one_output(eqn, k)
            if part is None:
                keys.append(("passed on", equation.serial, k))
            else:
                inputs = [equation.inputs[position] for position in part[1]]
                keys.append(self._key(part[0], inputs, equation.guards))
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


def use_saved(program: FlatProgram, place: Mapping[int, int]) -> FlatProgram:
    """Returns `program` with recomputed values that cross submeshes replaced by the saved ones.

    Args:
        program: The flat program.
        place: Submesh of each equation, by serial.
    """
    return replace(program, steps=_Saved(place).steps(program.steps))
