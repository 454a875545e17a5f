"""Turns a traced jaxpr into a flat program with joined scopes.

    a = jit[f](x)            # in scope `layer0`          a' = mul x 2.0     # scope `layer0/inner`
      where f: mul x 2.0     # in scope `inner`    ->
    c, ys = scan[body](w, c0, xs)                         loop i < length, c = c0:
                                                            x = slice xs i ; ... ; ys = write ys i

Inner jits and custom derivatives are always inlined, and so is a remat region in a forward pass. A
remat region that recomputes is cut when it touches several submeshes (R20), and so is a scan (R11);
otherwise both stay one equation, unless tasks are never to be fused: then a scan of several tasks
is cut too. A scan over layers (`scanned=True`) is written out, layer by layer. A conditional that
touches several submeshes, or none that is known yet, is opened: its branches stand under guards,
and `partition.branches` makes one conditional per submesh of them (R12). A `while` that touches
several submeshes becomes a loop that carries its own condition:

    while test(c): c = body(c)                 ->         loop while p, p = test c0, c = c0:
                                                            c' = body c ; p' = test c'
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.scopes import in_iteration, scope_of_equation
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.flat import (
    Carry,
    Equation,
    FlatProgram,
    Guard,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
)
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.remat import CALLS, is_remat, recomputes
from multimesh._src.partition.seeds import Seeds

_MAX_SCALARS = 16  # elements up to which a conditional without tasks is not worth cutting


def inline(traced: TracedFunction, seeds: Seeds) -> FlatProgram:
    """Returns the flat program of a traced function.

    Args:
        traced: The function; its jaxpr's consts become `constants`.
        seeds: Decides which scans and remat regions are cut.
    """
    builder = Builder(seeds, fuses=traced.settings.enable_task_fusion != "never")
    jaxpr = jaxprs.open_jaxpr(traced.jaxpr)
    consts = jaxprs.consts_of(traced.jaxpr)
    arguments = tuple(builder.new(var.aval) for var in jaxpr.invars)
    operands = [*map(builder.constant, consts), *arguments]
    variables = [*jaxpr.constvars, *jaxpr.invars] if jaxpr.constvars else jaxpr.invars
    results = builder.inline(jaxpr.eqns, jaxpr.outvars, variables, operands, traced.ambient)
    return FlatProgram(
        name=traced.name,
        avals=builder.avals,
        arguments=arguments,
        constants=builder.constants,
        steps=tuple(builder.steps),
        results=tuple(results),
    )


def keep_weak_types(program: FlatProgram, traced: TracedFunction, seeds: Seeds) -> FlatProgram:
    """Returns `program` with results as weakly typed as those of the traced function.

    On the way to them conversions that change nothing else were left out.
    """
    builder = Builder(
        seeds,
        avals=dict(program.avals),
        constants=dict(program.constants),
        steps=list(program.steps),
        num_steps=last_serial(program.steps) + 1,
    )
    results = list(program.results)
    wanted: list[Any] = [var.aval for var in jaxprs.open_jaxpr(traced.jaxpr).outvars]
    for position, aval in enumerate(wanted):
        if builder.aval(results[position]).weak_type != aval.weak_type:
            convert = partial(_with_weak_type, weak_type=aval.weak_type)
            (results[position],) = builder.emit(convert, [results[position]], traced.ambient)
    return replace(program, avals=builder.avals, steps=tuple(builder.steps), results=tuple(results))


def _with_weak_type(x: jax.Array, *, weak_type: bool) -> jax.Array:
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak_type, sharding=None)


def last_serial(steps: tuple[Step, ...]) -> int:
    """The largest serial of some steps at any depth; -1 if there are none."""
    return max(
        (
            max(step.serial, last_serial(step.body)) if isinstance(step, Loop) else step.serial
            for step in steps
        ),
        default=-1,
    )


@dataclass(slots=True)
class Builder:
    """A flat program in the making: numbers variables and equations."""

    seeds: Seeds
    fuses: bool = True
    avals: dict[Var, Any] = field(default_factory=dict)
    constants: dict[Var, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    num_steps: int = 0
    guards: tuple[Guard, ...] = ()  # the branches around what is appended
    _callers: tuple[Any, ...] = ()
    _emits: bool = False
    _constant_of: dict[int, Var] = field(default_factory=dict)
    _pieces: dict[Var, list[Operand]] = field(default_factory=dict)  # of stacks made here

    def new(self, aval: Any) -> Var:
        """Returns a new variable of type `aval`."""
        var = len(self.avals)
        self.avals[var] = aval
        return var

    def serial(self) -> int:
        """Returns a new serial number for a step."""
        self.num_steps += 1
        return self.num_steps - 1

    def constant(self, value: Any) -> Operand:
        """Returns the operand of a closed-over value; one array is one constant."""
        aval = jax.typeof(value)
        if not isinstance(value, jax.Array) and np.ndim(value) == 0:
            return Lit(value, aval)
        if id(value) not in self._constant_of:
            var = self.new(aval)
            self.constants[var] = value
            self._constant_of[id(value)] = var
        return self._constant_of[id(value)]

    def inline(
        self,
        eqns: Sequence[Any],
        outvars: Sequence[Any],
        variables: Sequence[Any],
        operands: Sequence[Operand],
        scope: Scope,
    ) -> list[Operand]:
        """Appends the equations of a jaxpr whose `variables` stand for `operands`."""
        env: dict[Any, Operand] = dict(zip(variables, operands, strict=True))

        def read(atom: Any) -> Operand:
            return Lit(atom.val, atom.aval) if jaxprs.is_literal(atom) else env[atom]

        for eqn in eqns:
            inputs = [read(atom) for atom in eqn.invars]
            outputs = self._inline_equation(eqn, inputs, scope.join(scope_of_equation(eqn)))
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in outvars]

    def _inline_equation(self, eqn: Any, inputs: list[Operand], scope: Scope) -> Sequence[Operand]:
        opens = self._opener(eqn, scope)
        if opens is not None:
            outside, self._callers = self._callers, (eqn, *self._callers)
            results = opens(eqn, inputs, scope)
            self._callers = outside
            return results
        if not self._emits and _is_only_weaker(eqn):
            return inputs  # else a sum that starts at `0.` would not be seen as one
        outputs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.steps.append(
            Equation(
                self.serial(),
                eqn,
                tuple(inputs),
                outputs,
                scope,
                guards=self.guards,
                callers=self._callers,
                emitted=self._emits,
            )
        )
        return outputs

    def _opener(self, eqn: Any, scope: Scope) -> Callable[..., Sequence[Operand]] | None:
        """What opens an equation with a program inside; None where it stays whole."""
        name = eqn.primitive.name
        if name in CALLS or (is_remat(eqn) and self._is_open(eqn, scope)):
            return self._inline_call
        runs = name == "scan" and eqn.params["length"] > 0  # an empty stack has no slices
        if runs and self.seeds.has_layers(eqn, scope):
            return self._write_out
        if runs and self._is_cut(eqn, scope):
            return self._inline_scan
        if name == "cond" and self._is_spread(eqn, scope):
            return self._inline_cond
        if name == "while" and self.seeds.num_submeshes_inside(eqn, scope) > 1:
            return self._inline_while
        return None

    def _is_cut(self, eqn: Any, scope: Scope) -> bool:
        """Whether a scan becomes a loop of tasks; one whole task is faster where it can be."""
        tasks = self.seeds.inside(eqn, scope)
        several = not self.fuses and len({match.name for match in tasks}) > 1
        return several or self.seeds.num_submeshes_inside(eqn, scope) > 1

    def _is_open(self, eqn: Any, scope: Scope) -> bool:
        """Whether a remat region is cut; one that is not differentiated recomputes nothing."""
        return not recomputes(eqn) or self.seeds.num_submeshes_inside(eqn, scope) > 1

    def _is_spread(self, eqn: Any, scope: Scope) -> bool:
        """Whether a conditional is cut: where no task is inside, its operands may lie anywhere."""
        if set(eqn.params) != {"branches"}:
            return False  # chosen by platform, which only lowering knows
        num_submeshes = self.seeds.num_submeshes_inside(eqn, scope)
        large = any(atom.aval.size > _MAX_SCALARS for atom in (*eqn.invars, *eqn.outvars))
        return num_submeshes > 1 or (num_submeshes == 0 and large)

    def _inline_call(self, eqn: Any, inputs: list[Operand], scope: Scope) -> list[Operand]:
        inner = jaxprs.sub_jaxprs(eqn.params)[0]
        return self.inline_closed(inner, inputs, scope)

    def inline_closed(self, closed: Any, inputs: Sequence[Operand], scope: Scope) -> list[Operand]:
        """Appends the equations of a jaxpr that may carry consts."""
        jaxpr = jaxprs.open_jaxpr(closed)
        consts = [self.constant(value) for value in jaxprs.consts_of(closed)]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        return self.inline(jaxpr.eqns, jaxpr.outvars, variables, [*consts, *inputs], scope)

    def emit(
        self, function: Callable[..., Any], inputs: Sequence[Operand], scope: Scope
    ) -> list[Operand]:
        """Appends the equations of a small JAX function of `inputs`."""
        avals = [self.aval(operand) for operand in inputs]
        structs = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals
        ]
        before, self._emits = self._emits, True
        made = self.inline_closed(jax.make_jaxpr(function)(*structs), inputs, scope)
        self._emits = before
        return made

    def aval(self, operand: Operand) -> Any:
        """The type of an operand."""
        return operand.aval if isinstance(operand, Lit) else self.avals[operand]

    def _inline_scan(self, eqn: Any, inputs: list[Operand], scope: Scope) -> Sequence[Operand]:
        # (consts, init, xs) -> (carry, ys), with xs sliced and ys written inside the body
        parts = jaxprs.scan_parts(eqn)
        length, split = parts.length, parts.num_consts + parts.num_carry
        consts, inits, xs = (
            inputs[: parts.num_consts],
            inputs[parts.num_consts : split],
            inputs[split:],
        )
        stacks = [self._empty_stack(var.aval, scope) for var in eqn.outvars[parts.num_carry :]]
        outer, self.steps = self.steps, []

        index = self.new(jax.typeof(np.int32(0)))
        inside = [self.new(var.aval) for var in eqn.outvars]
        (position,) = (
            self.emit(lambda i: lax.sub(np.int32(length - 1), i), [index], scope)
            if parts.reverse
            else [index]
        )
        slices = [self.emit(read_slot, [x, position], scope)[0] for x in xs]
        carried = inside[: parts.num_carry]
        results = self.inline_closed(parts.jaxpr, [*consts, *carried, *slices], scope)
        written = [
            self.emit(write_slot, [stack, value, position], scope)[0]
            for stack, value in zip(
                inside[parts.num_carry :], results[parts.num_carry :], strict=True
            )
        ]
        body, self.steps = self.steps, outer
        outputs = [self.new(var.aval) for var in eqn.outvars]
        carries = tuple(
            map(
                Carry,
                [*inits, *stacks],
                inside,
                [*results[: parts.num_carry], *written],
                outputs,
            )
        )
        own = scope_of_equation(eqn).markers
        marker = next((m for m in own if microbatch_marker(m) is not None), "")
        loop = Loop(self.serial(), length, index, carries, tuple(body), scope, marker, self.guards)
        self.steps.append(loop)
        return outputs

    def _inline_while(self, eqn: Any, inputs: list[Operand], scope: Scope) -> Sequence[Operand]:
        # (condition's consts, body's consts, init) -> carry; the condition is carried as well
        params = eqn.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        tests, consts, inits = inputs[:first], inputs[first:second], inputs[second:]
        inits += self.inline_closed(params["cond_jaxpr"], [*tests, *inits], scope)
        inits.append(self._any(inits[-1], scope))
        outer, self.steps = self.steps, []
        types = [*(var.aval for var in eqn.outvars), self.aval(inits[-2]), self.aval(inits[-1])]
        inside = [self.new(aval) for aval in types]
        *olds, flags, condition = inside
        nexts = self.inline_closed(params["body_jaxpr"], [*consts, *olds], scope)
        if self.avals[flags].ndim:
            triples = ([flags, next_, old] for next_, old in zip(nexts, olds, strict=True))
            nexts = [self.emit(_where, triple, scope)[0] for triple in triples]
        nexts += self.inline_closed(params["cond_jaxpr"], [*tests, *nexts], scope)
        nexts.append(self._any(nexts[-1], scope))
        body, self.steps = self.steps, outer
        outputs = [self.new(aval) for aval in types]
        carries = tuple(map(Carry, inits, inside, nexts, outputs))
        index = self.new(jax.typeof(np.int32(0)))
        loop = Loop(
            self.serial(), 0, index, carries, tuple(body), scope, "", self.guards, condition
        )
        self.steps.append(loop)
        return outputs[:-2]

    def _any(self, flags: Operand, scope: Scope) -> Operand:
        """Whether one of the flags is true: under `vmap` a condition has one per element."""
        return self.emit(jnp.any, [flags], scope)[0] if self.aval(flags).ndim else flags

    def _inline_cond(self, eqn: Any, inputs: list[Operand], scope: Scope) -> Sequence[Operand]:
        index, *operands = inputs
        branches = eqn.params["branches"]
        if isinstance(index, Lit):
            taken = min(max(int(index.value), 0), len(branches) - 1)
            return self.inline_closed(branches[taken], operands, scope)
        outer, guard = self.guards, Guard(self.serial(), index, -1, eqn)
        results: list[list[Operand]] = []
        for number, branch in enumerate(branches):
            self.guards = (*outer, replace(guard, branch=number))
            results.append(self.inline_closed(branch, operands, scope))
        self.guards = outer
        return [self._choose(guard, options, scope) for options in zip(*results, strict=True)]

    def _choose(self, guard: Guard, options: Sequence[Operand], scope: Scope) -> Operand:
        first, *others = options
        if not isinstance(first, Lit) and all(other == first for other in others):
            return first
        (result,) = self.emit(lax.select_n, [guard.index, *options], scope)
        step = self.steps[-1]
        assert isinstance(step, Equation)
        self.steps[-1] = replace(step, chooses=guard)
        return result

    def _write_out(self, eqn: Any, inputs: list[Operand], scope: Scope) -> Sequence[Operand]:
        """Appends every iteration of a scan over layers, for each has a submesh of its own.

        What the scan stacks is remembered piece by piece: the scan of the backward pass reads the
        pieces, and a stack that nobody reads as a whole is never made.
        """
        parts = jaxprs.scan_parts(eqn)
        split = parts.num_consts + parts.num_carry
        consts, carried, xs = (
            inputs[: parts.num_consts],
            inputs[parts.num_consts : split],
            inputs[split:],
        )
        loop = self.serial()
        order = range(parts.length)
        rows: dict[int, list[Operand]] = {}
        for position in reversed(order) if parts.reverse else order:
            inside = in_iteration(scope, loop, position)
            slices = [self._piece(x, position, inside) for x in xs]
            results = self.inline_closed(parts.jaxpr, [*consts, *carried, *slices], inside)
            carried, rows[position] = results[: parts.num_carry], results[parts.num_carry :]
        columns = [list(column) for column in zip(*(rows[i] for i in order), strict=True)]
        stacks = [self._stack(column, scope) for column in columns]
        return [*carried, *stacks]

    def _piece(self, stack: Operand, position: int, scope: Scope) -> Operand:
        if not isinstance(stack, Lit) and stack in self._pieces:
            return self._pieces[stack][position]
        return self.emit(lambda x: lax.index_in_dim(x, position, 0, False), [stack], scope)[0]

    def _stack(self, pieces: list[Operand], scope: Scope) -> Operand:
        def stacked(*values: jax.Array) -> jax.Array:
            return lax.concatenate([lax.expand_dims(value, (0,)) for value in values], 0)

        (stack,) = self.emit(stacked, pieces, scope)
        assert not isinstance(stack, Lit)
        self._pieces[stack] = pieces
        return stack

    def _empty_stack(self, aval: Any, scope: Scope) -> Operand:
        return self.emit(lambda: empty(aval.shape, aval.dtype), [], scope)[0]


def _is_only_weaker(eqn: Any) -> bool:
    """Whether an equation changes nothing but whether Python may widen a type."""
    if eqn.primitive.name != "convert_element_type" or jaxprs.is_literal(eqn.invars[0]):
        return False
    (old,), (new,) = eqn.invars, eqn.outvars
    return old.aval.strip_weak_type() == new.aval.strip_weak_type()


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros of any type, keys included."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return lax.full(shape, 0, dtype)
    base = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return jax.random.wrap_key_data(jnp.zeros(base.shape, base.dtype), impl=dtype._impl.name)


def read_slot(stack: jax.Array, index: jax.Array) -> jax.Array:
    """Reads `stack[index]` without the clamping of negative indices."""
    starts = (index, *(np.int32(0),) * (stack.ndim - 1))
    piece = lax.dynamic_slice_p.bind(stack, *starts, slice_sizes=(1, *stack.shape[1:]))
    return lax.squeeze(piece, (0,))


def _where(flags: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Chooses by the leading dims."""
    mask = lax.broadcast_in_dim(flags, new.shape, tuple(range(flags.ndim)))
    return lax.select(mask, new, old)


def write_slot(stack: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Writes `stack[index] = value`."""
    starts = (index, *(np.int32(0),) * (stack.ndim - 1))
    return lax.dynamic_update_slice_p.bind(stack, lax.expand_dims(value, (0,)), *starts)
