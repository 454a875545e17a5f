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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from multimesh._src.ir.flat import Carry, Equation, Lit, Loop, Operand, Step, Var, substitute
from multimesh._src.ir.scope import Scope
from multimesh._src.partition.carries import classify_carries
from multimesh._src.partition.stacks.blocks import Blocks
from multimesh._src.partition.stacks.parts import Fill, PartMaker, Rows, Stack
from multimesh._src.partition.stacks.rows import (
    Relation,
    relation_of,
    rows_of_join,
    rows_of_read,
)

_ADD = ("add", "add_any")
_NOBODY: tuple[int, ...] = ()

Bounds: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class StackSplitter:
    """A program in the making.

    Attributes:
        maker: Appends equations on parts.
        blocks: The blocks of each stack variable.
        fine: Where the pieces of gradients begin, of each stack variable.
        users: The submeshes that use the rows that an equation reads, by serial.
        env: The parts of the stacks that are made so far.
    """

    maker: PartMaker
    blocks: Mapping[Var, Blocks]
    fine: Mapping[Var, Bounds]
    users: Mapping[int, tuple[int, ...]]
    env: dict[Var, Stack] = field(default_factory=dict)
    _renamed: dict[Var, Operand] = field(default_factory=dict)
    _whole: dict[Var, Operand] = field(default_factory=dict)
    _in_loop: bool = False

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

    # --- equations ------------------------------------------------------------------------------

    def _equation(self, equation: Equation) -> None:
        stacks = [v for v in equation.inputs if not isinstance(v, Lit) and v in self.env]
        outputs = [v for v in equation.outputs if v in self.blocks]
        relation = relation_of(equation, self.maker.builder.avals)
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
                self.maker.builder.steps.append(self._looked_up(equation))

    def _looked_up(self, equation: Equation) -> Equation:
        inputs = tuple(self.value(operand) for operand in equation.inputs)
        return equation if inputs == equation.inputs else replace(equation, inputs=inputs)

    def _join(self, equation: Equation) -> None:
        """Notes the pieces, joined only where the parts of gradients are larger."""
        (output,) = equation.outputs
        last_row = self.blocks[output].bounds[-1]
        found: dict[tuple[int, int], Operand] = {}
        rows = rows_of_join(equation, self.maker.builder.avals)
        for (start, stop), operand in zip(rows, equation.inputs, strict=False):
            inner = [bound for bound in self.blocks[output].bounds if start < bound < stop]
            ends, value = (start, *inner, stop), self.value(operand)
            for first, last in pairwise(ends):
                found[first, last] = self.maker.cut(
                    value, first - start, last - start, equation.scope, None, light=False
                )
        bounds = tuple(sorted({0, last_row, *(bound for piece in found for bound in piece)}))
        parts = tuple(found.get(ends) for ends in pairwise(bounds))
        self.env[output] = Rows(bounds, parts, loose=True)
        fine = self.fine[output]
        self.env[output] = Rows(fine, self._or_zeros(output, fine, equation.scope), loose=True)

    def _each_part(self, equation: Equation, relation: Relation) -> None:
        """An equation row by row: on blocks, or inside loops on the pieces of gradients."""
        (output,) = equation.outputs
        aligned = [equation.inputs[i] for i in relation.aligned]
        adds = equation.primitive in _ADD and len(aligned) == 2
        loose = self._is_loose(aligned, adds)
        bounds = self.fine[output] if loose else self.blocks[output].bounds
        owners = None if loose else self.blocks[output]
        columns: list[Sequence[Operand | None]] = []
        for position, operand in enumerate(equation.inputs):
            if position not in relation.aligned or isinstance(operand, Lit):
                columns.append([self.value(operand)] * (len(bounds) - 1))
            elif loose and adds:
                columns.append(self._or_zeros(operand, bounds, equation.scope))
            else:
                columns.append(self._parts(operand, bounds, equation.scope, owners))
        parts: list[Operand | None] = []
        for number, inputs in enumerate(zip(*columns, strict=True)):
            operands = [operand for operand in inputs if operand is not None]
            if len(operands) < len(inputs):  # a sum with zeros
                parts.append(operands[0] if operands else None)
                continue
            num_rows = bounds[number + 1] - bounds[number]
            owner = None if owners is None else owners.owner(number)
            parts.append(self.maker.resized(equation, operands, num_rows, owner))
        self.env[output] = Rows(bounds, tuple(parts), loose)

    def _is_loose(self, aligned: Sequence[Operand], adds: bool) -> bool:
        """Whether an equation is done piece by piece: in loops, and in sums of pieces alone."""
        stacks = [self.env[v] for v in aligned if not isinstance(v, Lit) and v in self.env]
        loose = [stack.loose for stack in stacks if isinstance(stack, Rows)]
        return any(loose) if self._in_loop else adds and bool(loose) and all(loose)

    def _reduce(self, equation: Equation) -> None:
        """A reduction over rows: of each part, then of the parts' results."""
        (operand,) = equation.inputs
        (output,) = equation.outputs
        assert not isinstance(operand, Lit)
        loose = self._in_loop and self._is_loose([operand], adds=False)
        bounds = self.fine[operand] if loose else self.blocks[operand].bounds
        owners = None if loose else self.blocks[operand]
        aval = self.maker.builder.avals[output]
        partials: list[Operand] = []
        for number, part in enumerate(self._parts(operand, bounds, equation.scope, owners)):
            owner = None if owners is None else owners.owner(number)
            num_rows = bounds[number + 1] - bounds[number]
            partials.append(self.maker.on_rows(equation, [part], aval, num_rows, owner))
        total, *rest = partials
        for partial in rest:
            total = self.maker.combined(equation, total, partial)
        self._renamed[output] = total

    def _read(self, equation: Equation) -> None:
        """Some rows: a part as it is, or cut where the block lies, or inside their users."""
        (stack,) = equation.inputs
        (output,) = equation.outputs
        read = rows_of_read(equation)
        users = self.users.get(equation.serial, _NOBODY)
        rows = self._range(stack, read.start, read.stop, equation.scope, None, users)
        aval = self.maker.builder.avals[output]
        if self.maker.builder.aval(rows).shape != aval.shape:  # cut along other dims too
            rows = self.maker.on_rows(equation, [rows], aval, len(read), None)
        self._renamed[output] = rows

    # --- parts ----------------------------------------------------------------------------------

    def _parts(
        self, operand: Operand, bounds: Bounds, scope: Scope, owners: Blocks | None
    ) -> list[Operand]:
        """A stack in parts with these bounds; outside of loops its blocks are made once."""
        ends = pairwise(bounds)
        parts = [
            self._range(operand, start, stop, scope, None if owners is None else owners.owner(i))
            for i, (start, stop) in enumerate(ends)
        ]
        if owners is None or self._in_loop or isinstance(operand, Lit):
            return parts
        if operand in self.env:
            self.env[operand] = Rows(bounds, tuple(parts), loose=False)
        return parts

    def _or_zeros(
        self, operand: Operand, bounds: Bounds, scope: Scope
    ) -> tuple[Operand | None, ...]:
        """The same, wherever they lie; None where all is zeros."""
        stack = None if isinstance(operand, Lit) else self.env.get(operand)
        return tuple(
            None
            if isinstance(stack, Rows) and stack.is_zero(start, stop)
            else self._range(operand, start, stop, scope, None)
            for start, stop in pairwise(bounds)
        )

    def _range(
        self,
        operand: Operand,
        start: int,
        stop: int,
        scope: Scope,
        owner: int | None,
        users: tuple[int, ...] = _NOBODY,
    ) -> Operand:
        """Rows of a stack, joined on `owner` if it is given; `users` are who reads them."""
        stack = None if isinstance(operand, Lit) else self.env.get(operand)
        if stack is None or isinstance(operand, Lit):
            return self.maker.cut(self.value(operand), start, stop, scope, owner, light=False)
        if isinstance(stack, Fill):
            equation = stack.equation
            return self.maker.resized(equation, equation.inputs, stop - start, owner)
        blocks, pieces = self.blocks[operand], []
        aval = self.maker.builder.avals[operand]
        for number, part in enumerate(stack.parts):
            first, last = stack.bounds[number : number + 2]
            a, b = max(start, first), min(stop, last)
            if a >= b:
                continue
            if part is None:
                pieces.append(self.maker.zeros(aval, b - a, scope, owner))
                continue
            home = owner if stack.loose else blocks.owner(number)
            light = home is not None and not set(users) - {home}
            pieces.append(self.maker.cut(part, a - first, b - first, scope, home, light))
        return self.maker.joined(pieces, scope, owner)

    # --- loops ----------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> None:
        builder = self.maker.builder
        kinds = classify_carries(loop, {})
        stacked = [carry for carry in loop.carries if carry.inside in self.blocks]
        others = [carry for carry in loop.carries if carry.inside not in self.blocks]
        inits: dict[Var, Sequence[Operand]] = {}
        for carry in stacked:
            loose = kinds[carry.inside] == "accumulated"
            inits[carry.inside] = self._enter(carry, loop.scope, loose)
        starts = [self.value(carry.init) for carry in others]

        outer, builder.steps = builder.steps, []
        was_in_loop, self._in_loop = self._in_loop, True
        entered = {carry.inside: self.env[carry.inside] for carry in stacked}
        self.steps(loop.body)
        carries = [
            replace(carry, init=init, next=self.value(carry.next))
            for carry, init in zip(others, starts, strict=True)
        ]
        fixed: dict[Var, Operand] = {}
        for carry in stacked:
            inside = entered[carry.inside]
            assert isinstance(inside, Rows)
            carries += self._leave(carry, inside, inits[carry.inside], fixed)
        body, builder.steps = tuple(builder.steps), outer
        self._in_loop = was_in_loop
        builder.steps += substitute((replace(loop, carries=tuple(carries), body=body),), fixed)

    def _enter(self, carry: Carry, scope: Scope, loose: bool) -> list[Operand]:
        """Gives a carry one variable per part inside of the loop; returns the initial parts."""
        var = carry.inside
        bounds = self.fine[var] if loose else self.blocks[var].bounds
        owners = None if loose else self.blocks[var]
        inits = self._parts(carry.init, bounds, scope, owners)
        builder = self.maker.builder
        insides = tuple(builder.new(builder.aval(init)) for init in inits)
        self.env[var] = Rows(bounds, insides, loose)
        return inits

    def _leave(
        self, carry: Carry, inside: Rows, inits: Sequence[Operand], fixed: dict[Var, Operand]
    ) -> list[Carry]:
        """One carry per part; a part that stays as it is from turn to turn is none."""
        owners = None if inside.loose else self.blocks[carry.inside]
        nexts = self._parts(carry.next, inside.bounds, Scope(), owners)
        results: list[Operand] = []
        carries: list[Carry] = []
        for init, var, next_ in zip(inits, inside.parts, nexts, strict=True):
            assert isinstance(var, Var)
            if next_ == var:
                fixed[var] = init
                results.append(init)
                continue
            result = self.maker.builder.new(self.maker.builder.avals[var])
            carries.append(Carry(init, var, next_, result))
            results.append(result)
        self.env[carry.result] = Rows(inside.bounds, tuple(results), inside.loose)
        return carries
