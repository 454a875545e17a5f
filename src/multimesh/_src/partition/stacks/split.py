"""Rewrites a program so that every stack is one array per block.

    w: f32[4,8,8]                             w_a: f32[2,8,8] @0    w_b: f32[2,8,8] @1
    x = layer1(x, w[1]) @0                    x = layer1(x, w_a[1]) @0
    x = layer2(x, w[2]) @1              ->    x = layer2(x, w_b[0]) @1
    g = concatenate dw0 dw1 dw2 dw3           g_a = concatenate dw0 dw1 ; g_b = concatenate dw2 dw3
    w' = w - 0.1 g                            w_a' = w_a - 0.1 g_a ; w_b' = w_b - 0.1 g_b

Rows that the block's own submesh reads are cut inside the tasks that read them, at places that are
arguments, so that equal layers stay one program. Rows that another submesh reads are cut where the
block lies, and move once. Inside of microbatch loops gradients stay in the pieces in which the
layers make them: they are joined, and moved where they must, once after the loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from multimesh._src.ir.flat import Carry, Equation, Lit, Loop, Operand, Step, Var, substitute
from multimesh._src.ir.scope import Scope
from multimesh._src.partition.carries import classify_carries
from multimesh._src.partition.inline import Builder, empty
from multimesh._src.partition.stacks.blocks import Blocks
from multimesh._src.partition.stacks.rows import (
    REDUCTIONS,
    Relation,
    relation_of,
    rows_of_join,
    rows_of_read,
    with_rows,
)

_ADD = ("add", "add_any")


@dataclass(frozen=True, slots=True)
class Rows:
    """A stack in parts: rows `bounds[i]` to `bounds[i + 1]` are in `parts[i]`; None is zeros.

    `loose` parts lie where they were made, others on the submesh of their block.
    """

    bounds: tuple[int, ...]
    parts: tuple[Operand | None, ...]
    loose: bool


@dataclass(frozen=True, slots=True)
class Fill:
    """A stack whose rows are all equal, made where it is used."""

    equation: Equation


Stack: TypeAlias = Rows | Fill
Bounds: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class StackSplitter:
    """A program in the making.

    Attributes:
        builder: Numbers variables and equations, and collects the steps.
        blocks: The blocks of each stack variable.
        fine: Where the pieces of gradients begin, of each stack variable.
        users: The submeshes that use the rows that an equation reads, by serial.
        pinned: The submesh of equations that must run there, by serial.
        light: Serials of the equations that tasks may clone.
    """

    builder: Builder
    blocks: Mapping[Var, Blocks]
    fine: Mapping[Var, Bounds]
    users: Mapping[int, tuple[int, ...]]
    pinned: dict[int, int] = field(default_factory=dict)
    light: set[int] = field(default_factory=set)
    env: dict[Var, Stack] = field(default_factory=dict)
    _renamed: dict[Var, Operand] = field(default_factory=dict)
    _whole: dict[Var, Operand] = field(default_factory=dict)
    _indices: dict[int, Var] = field(default_factory=dict)
    _traced: dict[Any, Any] = field(default_factory=dict)
    _in_loop: bool = False

    # --- steps ----------------------------------------------------------------------------------

    def steps(self, steps: Sequence[Step]) -> None:
        """Appends what becomes of some steps."""
        for step in steps:
            if isinstance(step, Loop):
                self._loop(step)
            else:
                self._equation(step)

    def value(self, operand: Operand) -> Operand:
        """What stands for an operand that is needed as a whole."""
        if isinstance(operand, Lit):
            return operand
        if operand not in self.env:
            return self._renamed.get(operand, operand)
        if operand in self._whole:
            return self._whole[operand]
        num_rows = self.blocks[operand].bounds[-1]
        whole = self._range(operand, 0, num_rows, Scope(), None)
        if not self._in_loop:  # what is made in a loop is not known behind it
            self._whole[operand] = whole
        return whole

    def in_blocks(self, var: Var) -> tuple[Operand, ...]:
        """A stack as its blocks, each on its submesh."""
        blocks = self.blocks[var]
        return tuple(self._parts(var, blocks.bounds, Scope(), blocks))

    def _equation(self, equation: Equation) -> None:
        stacks = [v for v in equation.inputs if not isinstance(v, Lit) and v in self.env]
        outputs = [v for v in equation.outputs if v in self.blocks]
        relation = relation_of(equation, self.builder.avals)
        match relation.kind:
            case "join" if outputs:
                self._join(equation)
            case "fill" if outputs:
                self.env[outputs[0]] = Fill(self._looked_up(equation))
            case "rows" if outputs and stacks:
                self._each_part(equation, relation)
            case "reduction" if stacks:
                self._reduce(equation)
            case "read" if stacks:
                self._read(equation)
            case _:
                self.builder.steps.append(self._looked_up(equation))

    def _looked_up(self, equation: Equation) -> Equation:
        inputs = tuple(self.value(operand) for operand in equation.inputs)
        return equation if inputs == equation.inputs else replace(equation, inputs=inputs)

    def _join(self, equation: Equation) -> None:
        """Notes the pieces, joined only where the parts of gradients are larger."""
        (output,) = equation.outputs
        found: dict[tuple[int, int], Operand] = {}
        for (start, stop), operand in zip(
            rows_of_join(equation, self.builder.avals), equation.inputs, strict=False
        ):
            inner = [b for b in self.blocks[output].bounds if start < b < stop]
            ends = (start, *inner, stop)
            for first, last in zip(ends, ends[1:], strict=False):
                found[first, last] = self._cut(
                    self.value(operand), first - start, last - start, equation.scope, None
                )
        pieces = sorted(found)
        bounds = sorted({0, self.blocks[output].bounds[-1], *(b for piece in pieces for b in piece)})
        parts = tuple(found.get(ends) for ends in zip(bounds, bounds[1:], strict=False))
        self.env[output] = Rows(tuple(bounds), parts, True)
        fine = self.fine[output]
        joined = self._ranges(output, fine, equation.scope)
        self.env[output] = Rows(fine, joined, True)

    def _each_part(self, equation: Equation, relation: Relation) -> None:
        """An equation row by row: on blocks, or inside loops on the pieces of gradients."""
        (output,) = equation.outputs
        aligned = [equation.inputs[i] for i in relation.aligned]
        blocks = self.blocks[output]
        rows = [self.env[v] for v in aligned if not isinstance(v, Lit) and v in self.env]
        parted = [stack for stack in rows if isinstance(stack, Rows)]
        adds = equation.primitive in _ADD and len(aligned) == 2
        loose = (
            any(stack.loose for stack in parted)
            if self._in_loop
            else adds and bool(parted) and all(stack.loose for stack in parted)
        )
        bounds = self.fine[output] if loose else blocks.bounds
        owners = None if loose else blocks
        columns: list[Sequence[Operand | None]] = []
        for position, operand in enumerate(equation.inputs):
            if position not in relation.aligned or isinstance(operand, Lit):
                columns.append([self.value(operand)] * (len(bounds) - 1))
            elif loose and adds:
                columns.append(self._ranges(operand, bounds, equation.scope))
            else:
                columns.append(self._parts(operand, bounds, equation.scope, owners))
        parts = [
            self._part(equation, inputs, number, bounds, owners)
            for number, inputs in enumerate(zip(*columns, strict=True))
        ]
        self.env[output] = Rows(bounds, tuple(parts), loose)

    def _part(
        self,
        equation: Equation,
        inputs: Sequence[Operand | None],
        number: int,
        bounds: Bounds,
        owners: Blocks | None,
    ) -> Operand | None:
        operands = [operand for operand in inputs if operand is not None]
        if len(operands) < len(inputs):  # a sum with zeros
            return operands[0] if operands else None
        num_rows = bounds[number + 1] - bounds[number]
        owner = None if owners is None else owners.owner(number)
        return self._resized(equation, operands, num_rows, owner)

    def _resized(
        self, equation: Equation, inputs: Sequence[Operand], num_rows: int, owner: int | None
    ) -> Operand:
        """The equation for another number of rows."""
        (output,) = equation.outputs
        aval = self._with_rows(self.builder.avals[output], num_rows)
        return self._emit_resized(equation, inputs, aval, num_rows, owner)

    def _emit_resized(
        self,
        equation: Equation,
        inputs: Sequence[Operand],
        aval: Any,
        num_rows: int,
        owner: int | None,
    ) -> Operand:
        avals = [self.builder.aval(operand) for operand in inputs]
        eqn = with_rows(equation.eqn, num_rows, avals, aval)
        var = self.builder.new(aval)
        serial = self.builder.serial()
        self.builder.steps.append(
            replace(equation, serial=serial, eqn=eqn, inputs=tuple(inputs), outputs=(var,))
        )
        if owner is not None:
            self.pinned[serial] = owner
        return var

    @staticmethod
    def _with_rows(aval: Any, num_rows: int) -> Any:
        return aval.update(shape=(num_rows, *aval.shape[1:]))

    def _reduce(self, equation: Equation) -> None:
        """A reduction over rows: of each part, then of the parts' results."""
        (operand,) = equation.inputs
        (output,) = equation.outputs
        assert not isinstance(operand, Lit)
        stack, blocks = self.env[operand], self.blocks[operand]
        loose = isinstance(stack, Rows) and stack.loose and self._in_loop
        bounds, owners = (self.fine[operand], None) if loose else (blocks.bounds, blocks)
        parts = self._parts(operand, bounds, equation.scope, owners)
        aval = self.builder.avals[output]
        combine = getattr(lax, f"{REDUCTIONS[equation.primitive]}_p").bind
        total: Operand | None = None
        for number, part in enumerate(parts):
            owner = None if owners is None else owners.owner(number)
            num_rows = bounds[number + 1] - bounds[number]
            partial = self._emit_resized(equation, [part], aval, num_rows, owner)
            key = (equation.primitive, aval.shape, aval.dtype)
            total = (
                partial
                if total is None
                else self._emit(key, combine, [total, partial], equation.scope)
            )
        assert total is not None
        self._renamed[output] = total

    # --- reading rows ---------------------------------------------------------------------------

    def _read(self, equation: Equation) -> None:
        """Some rows: a part as it is, or cut where the block lies, or inside their users."""
        (stack,) = equation.inputs
        (output,) = equation.outputs
        assert not isinstance(stack, Lit)
        read = rows_of_read(equation)
        start, stop = read.start, read.stop
        users = self.users.get(equation.serial, ())
        rows = self._range(stack, start, stop, equation.scope, None, users)
        aval = self.builder.avals[output]
        if self.builder.aval(rows).shape != aval.shape:  # cut along other dims too
            rows = self._emit_resized(equation, [rows], aval, stop - start, None)
        self._renamed[output] = rows

    def _cut(
        self,
        part: Operand,
        start: int,
        stop: int,
        scope: Scope,
        owner: int | None,
        users: tuple[int, ...] = (),
    ) -> Operand:
        """Rows of one part."""
        shape = self.builder.aval(part).shape
        if (start, stop) == (0, shape[0]):
            return part
        if owner is None or set(users) - {owner}:
            return self._emit(
                ("slice", start, stop),
                lambda x: lax.slice_in_dim(x, start, stop),
                [part],
                scope,
                owner,
            )
        sizes = (stop - start, *shape[1:])
        index = self._index(start)

        def cut(x: jax.Array, index: jax.Array) -> Any:
            starts = (index, *(np.int32(0),) * (x.ndim - 1))
            return lax.dynamic_slice_p.bind(x, *starts, slice_sizes=sizes)

        before = self.builder.num_steps
        rows = self._emit(("cut", sizes), cut, [part, index], scope)
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

    def _parts(
        self, operand: Operand, bounds: Bounds, scope: Scope, owners: Blocks | None
    ) -> list[Operand]:
        """A stack in parts with these bounds; outside of loops its blocks are made once."""
        ends = zip(bounds, bounds[1:], strict=False)
        parts = [
            self._range(operand, start, stop, scope, None if owners is None else owners.owner(i))
            for i, (start, stop) in enumerate(ends)
        ]
        if owners is not None and not self._in_loop and not isinstance(operand, Lit):
            if operand in self.env:
                self.env[operand] = Rows(bounds, tuple(parts), False)
        return parts

    def _ranges(
        self, operand: Operand, bounds: Bounds, scope: Scope
    ) -> tuple[Operand | None, ...]:
        """The same; None where all is zeros."""
        stack = None if isinstance(operand, Lit) else self.env.get(operand)
        return tuple(
            None
            if isinstance(stack, Rows) and _all_zeros(stack, start, stop)
            else self._range(operand, start, stop, scope, None)
            for start, stop in zip(bounds, bounds[1:], strict=False)
        )

    def _range(
        self,
        operand: Operand,
        start: int,
        stop: int,
        scope: Scope,
        owner: int | None,
        users: tuple[int, ...] = (),
    ) -> Operand:
        """Rows `start` to `stop` of a stack, made on `owner` if it is given."""
        stack = None if isinstance(operand, Lit) else self.env.get(operand)
        match stack:
            case None:
                whole = self.value(operand)
                return self._cut(whole, start, stop, scope, owner, () if owner is None else (-1,))
            case Fill(equation):
                return self._resized(equation, equation.inputs, stop - start, owner)
            case Rows(bounds, parts):
                pieces: list[Operand] = []
                aval = self.builder.aval(operand)
                for number, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
                    if first < stop and start < last:
                        a, b = max(start, first), min(stop, last)
                        pieces.append(
                            self._piece(stack, operand, number, a, b, aval, scope, owner, users)
                        )
                if len(pieces) == 1:
                    return pieces[0]
                return self._emit(
                    ("join", stop - start), _joined, pieces, scope, owner
                )

    def _piece(
        self,
        stack: Rows,
        operand: Operand,
        number: int,
        start: int,
        stop: int,
        aval: Any,
        scope: Scope,
        owner: int | None,
        users: tuple[int, ...],
    ) -> Operand:
        part = stack.parts[number]
        if part is None:
            shape = (stop - start, *aval.shape[1:])
            return self._emit(
                ("zeros", shape, aval.dtype), lambda: empty(shape, aval.dtype), [], scope, owner
            )
        assert not isinstance(operand, Lit)
        blocks = self.blocks[operand]
        first = stack.bounds[number]
        if not stack.loose and stack.bounds == blocks.bounds:
            owner = blocks.owner(number)
        return self._cut(part, start - first, stop - first, scope, owner, users)

    def _emit(
        self,
        key: Any,
        function: Callable[..., Any],
        inputs: Sequence[Operand],
        scope: Scope,
        owner: int | None = None,
    ) -> Operand:
        """Appends a small function; functions of one key are equal."""
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

    # --- loops ----------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> None:
        kinds = classify_carries(loop, {})
        stacked = [carry for carry in loop.carries if carry.inside in self.blocks]
        loose = {c.inside for c in stacked if kinds[c.inside] == "accumulated"}
        inits: dict[Var, Sequence[Operand]] = {}
        insides: dict[Var, Sequence[Var]] = {}
        for carry in stacked:
            var = carry.inside
            blocks = self.blocks[var]
            bounds = self.fine[var] if var in loose else blocks.bounds
            owners = None if var in loose else blocks
            inits[var] = self._parts(carry.init, bounds, loop.scope, owners)
            insides[var] = [self.builder.new(self.builder.aval(value)) for value in inits[var]]
            self.env[var] = Rows(bounds, tuple(insides[var]), var in loose)
        others = [carry for carry in loop.carries if carry.inside not in self.blocks]
        starts = [self.value(carry.init) for carry in others]

        outer, self.builder.steps = self.builder.steps, []
        was_in_loop, self._in_loop = self._in_loop, True
        self.steps(loop.body)
        carries = [
            replace(carry, init=init, next=self.value(carry.next))
            for carry, init in zip(others, starts, strict=True)
        ]
        for carry in stacked:
            carries += self._carries_of(carry, inits[carry.inside], insides[carry.inside])
        body, self.builder.steps = tuple(self.builder.steps), outer
        self._in_loop = was_in_loop
        kept = {carry.inside for carry in carries}
        fixed: dict[Var, Operand] = {
            var: init
            for carry in stacked
            for var, init in zip(insides[carry.inside], inits[carry.inside], strict=True)
            if var not in kept
        }
        loop = replace(loop, carries=tuple(carries), body=body)
        self.builder.steps += substitute((loop,), fixed)

    def _carries_of(
        self, carry: Carry, inits: Sequence[Operand], insides: Sequence[Var]
    ) -> list[Carry]:
        """One carry per part; what a part keeps from turn to turn is no carry."""
        inside = self.env[carry.inside]
        assert isinstance(inside, Rows)
        owners = None if inside.loose else self.blocks[carry.inside]
        nexts = self._parts(carry.next, inside.bounds, Scope(), owners)
        results: list[Operand] = []
        carries: list[Carry] = []
        for init, var, next_ in zip(inits, insides, nexts, strict=True):
            if next_ == var:
                results.append(init)
                continue
            result = self.builder.new(self.builder.avals[var])
            carries.append(Carry(init, var, next_, result))
            results.append(result)
        self.env[carry.result] = Rows(inside.bounds, tuple(results), inside.loose)
        return carries


def _all_zeros(stack: Rows, start: int, stop: int) -> bool:
    ends = zip(stack.bounds, stack.bounds[1:], strict=False)
    return all(
        part is None
        for (first, last), part in zip(ends, stack.parts, strict=True)
        if first < stop and start < last
    )


def _joined(*parts: jax.Array) -> jax.Array:
    return lax.concatenate(parts, 0)
