"""Makes parts of stacks: equations for fewer rows, rows cut out, pieces joined, zeros.

    mul 0.9 m:f32[4,8]          resized to 2 rows    mul 0.9 m_a:f32[2,8]
    w_a[1]                      cut                  dynamic_slice w_a 1 0    # the 1 is an argument
    dw0:f32[1,8], dw1:f32[1,8]  joined               concatenate dw0 dw1

What is made on the submesh of a block is *pinned* to it. Rows for the block's own submesh are
*light*: every task that reads them cuts them for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from multimesh._src.ir.flat import Equation, Operand, Var
from multimesh._src.ir.scope import Scope
from multimesh._src.partition.inline import Builder, empty
from multimesh._src.partition.stacks.rows import REDUCTIONS, with_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """A stack in parts: rows `bounds[i]` to `bounds[i + 1]` are in `parts[i]`; None is zeros.

    `loose` parts lie where they were made, others on the submesh of their block.
    """

    bounds: tuple[int, ...]
    parts: tuple[Operand | None, ...]
    loose: bool

    def is_zero(self, start: int, stop: int) -> bool:
        """Whether some rows are zeros."""
        ends = pairwise(self.bounds)
        return all(
            part is None
            for (first, last), part in zip(ends, self.parts, strict=True)
            if first < stop and start < last
        )


@dataclass(frozen=True, slots=True)
class Fill:
    """A stack whose rows are all equal, made where it is used."""

    equation: Equation


Stack: TypeAlias = Rows | Fill


@dataclass(slots=True)
class PartMaker:
    """Appends equations on parts.

    Attributes:
        builder: Numbers variables and equations, and collects the steps.
        pinned: The submesh of equations that must run there, by serial.
        light: Serials of the equations that tasks may clone.
    """

    builder: Builder
    pinned: dict[int, int] = field(default_factory=dict)
    light: set[int] = field(default_factory=set)
    _indices: dict[int, Var] = field(default_factory=dict)
    _traced: dict[Any, Any] = field(default_factory=dict)

    def resized(
        self, equation: Equation, inputs: Sequence[Operand], num_rows: int, owner: int | None
    ) -> Operand:
        """The equation, whose result is a stack, for another number of rows."""
        aval = self.builder.avals[equation.outputs[0]]
        aval = aval.update(shape=(num_rows, *aval.shape[1:]))
        return self.on_rows(equation, inputs, aval, num_rows, owner)

    def on_rows(
        self,
        equation: Equation,
        inputs: Sequence[Operand],
        aval: Any,
        num_rows: int,
        owner: int | None,
    ) -> Operand:
        """The equation on operands with another number of rows; `aval` is the result's type."""
        avals = [self.builder.aval(operand) for operand in inputs]
        eqn = with_rows(equation.eqn, num_rows, avals, aval)
        var, serial = self.builder.new(aval), self.builder.serial()
        self.builder.steps.append(
            replace(equation, serial=serial, eqn=eqn, inputs=tuple(inputs), outputs=(var,))
        )
        if owner is not None:
            self.pinned[serial] = owner
        return var

    def combined(self, reduction: Equation, one: Operand, other: Operand) -> Operand:
        """Two results of a reduction as one."""
        name = REDUCTIONS[reduction.primitive]
        combine = getattr(lax, f"{name}_p").bind
        return self.emit(name, combine, [one, other], reduction.scope)

    def cut(
        self, part: Operand, start: int, stop: int, scope: Scope, owner: int | None, light: bool
    ) -> Operand:
        """Rows of one part."""
        shape = self.builder.aval(part).shape
        if (start, stop) == (0, shape[0]):
            return part
        if not light:

            def cut_here(x: jax.Array) -> jax.Array:
                return lax.slice_in_dim(x, start, stop)

            return self.emit(("slice", start, stop), cut_here, [part], scope, owner)
        sizes = (stop - start, *shape[1:])

        def cut_there(x: jax.Array, index: jax.Array) -> Any:
            starts = (index, *(np.int32(0),) * (x.ndim - 1))
            return lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)

        before = self.builder.num_steps
        rows = self.emit(("cut", sizes), cut_there, [part, self._index(start)], scope)
        self.light.update(range(before, self.builder.num_steps))
        return rows

    def _index(self, position: int) -> Var:
        """A constant that says where to cut: as an operand, so that equal tasks stay equal."""
        if position not in self._indices:
            value = np.int32(position)
            var = self.builder.new(jax.typeof(value))
            self.builder.constants[var] = value
            self._indices[position] = var
        return self._indices[position]

    def joined(self, pieces: Sequence[Operand], scope: Scope, owner: int | None) -> Operand:
        """Pieces one behind the other."""
        if len(pieces) == 1:
            return pieces[0]

        def join(*parts: jax.Array) -> jax.Array:
            return lax.concatenate(parts, 0)

        return self.emit("join", join, pieces, scope, owner)

    def zeros(self, like: Any, num_rows: int, scope: Scope, owner: int | None) -> Operand:
        """Rows of zeros of a stack of type `like`."""
        shape = (num_rows, *like.shape[1:])

        def make() -> jax.Array:
            return empty(shape, like.dtype)

        return self.emit(("zeros", shape, like.dtype), make, [], scope, owner)

    def emit(
        self,
        key: Any,
        function: Callable[..., Any],
        inputs: Sequence[Operand],
        scope: Scope,
        owner: int | None = None,
    ) -> Operand:
        """Appends a small function; functions of one key are equal, and traced once per types."""
        avals = tuple(self.builder.aval(operand) for operand in inputs)
        key = (key, tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals))
        if key not in self._traced:
            structs = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
                for aval in avals
            ]
            self._traced[key] = jax.make_jaxpr(function)(*structs)
        before = self.builder.num_steps
        (result,) = self.builder.inline_closed(self._traced[key], inputs, scope)
        if owner is not None:
            new = range(before, self.builder.num_steps)
            self.pinned.update(dict.fromkeys(new, owner))
        return result
