"""Joins a loop and its transpose into one loop, so that one schedule orders both (R11).

    loop i < 4: y = task0(x[i]) ; ys' = write ys i y        loop i < 4:
    g = 1 / 4                                          ->     y = task0(x[i])
    loop j < 4: d = task0^T(ys[3 - j], g) ; acc' = acc + d    d = task0^T(y, g) ; acc' = acc + d

`jax.grad` of a microbatched loss gives two loops: one that stacks what the second reads, from the
last iteration to the first. Where iteration i of the second needs only iteration i of the first,
and only adds up or writes what it makes, the two run as one; the stacks that nobody else reads are
then never built, and a microbatch's residuals die with its backward. Elsewhere (the gradient
depends on the loss of all microbatches, layers that follow each other) the loops stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Lit,
    Loop,
    Operand,
    Step,
    Var,
    free_variables,
    producers,
    step_inputs,
    substitute,
)
from multimesh._src.partition.carries import classify_carries
from multimesh._src.partition.prune import has_effect


def merge_transposes(program: FlatProgram) -> FlatProgram:
    """Returns `program` with every loop and its transpose as one, where that can be."""
    return replace(program, steps=_merge_steps(program.steps))


def _merge_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    done = [
        replace(step, body=_merge_steps(step.body)) if isinstance(step, Loop) else step
        for step in steps
    ]
    for first in [step for step in done if isinstance(step, Loop)]:
        place = next((k for k, step in enumerate(done) if step is first), None)
        if place is None:
            continue  # it was the second of a pair
        for second in [step for step in done[place + 1 :] if isinstance(step, Loop)]:
            merged = _merged(first, done[place + 1 : done.index(second)], second)
            if merged is not None:
                done[place : done.index(second) + 1] = merged
                break
    return tuple(done)


def _merged(first: Loop, between: Sequence[Step], second: Loop) -> list[Step] | None:
    """What stands for the two loops and the steps between them; None if they stay apart."""
    if first.condition is not None or second.condition is not None:
        return None
    if first.length != second.length or second.scope.transposes <= first.scope.transposes:
        return None
    if len({first.marker, second.marker} - {""}) > 1:
        return None
    if any(has_effect(step) for step in (first, *between, second)):
        return None
    stacks = _stacks(first)
    transpose = _Transpose(second, _reversed_positions(second))
    if not transpose.may_run_forward() or not transpose.reads_only_own_slots(stacks):
        return None
    before, after, tainted = _split_at(between, first)
    if _reads(second) & ((tainted | set(first.outputs)) - stacks.keys()):
        return None
    if any(carry.init in stacks for carry in second.carries):
        return None
    own = transpose.at(first.index, stacks)
    merged = replace(
        first,
        carries=(*first.carries, *own.carries),
        body=(*first.body, *own.body),
        marker=first.marker or second.marker,
    )
    return [*before, merged, *after]


def _reads(step: Step) -> set[Var]:
    return {operand for operand in step_inputs(step) if not isinstance(operand, Lit)}


def _split_at(between: Sequence[Step], first: Loop) -> tuple[list[Step], list[Step], set[Var]]:
    """The steps that need nothing of `first`, the others, and what those make."""
    before: list[Step] = []
    after: list[Step] = []
    tainted = set(first.outputs)
    for step in between:
        if _reads(step) & tainted:
            after.append(step)
            tainted.update(step.outputs)
        else:
            before.append(step)
    return before, after, tainted


# --- the first loop -------------------------------------------------------------------------------


def _stacks(loop: Loop) -> dict[Var, tuple[Var, Operand]]:
    """Results with one slot per iteration: the slot `[1, ...]`, and what was put into it."""
    made_by = producers(loop.body)
    kinds = classify_carries(loop, {})
    found: dict[Var, tuple[Var, Operand]] = {}
    for carry in loop.carries:
        write = None if isinstance(carry.next, Lit) else made_by.get(carry.next)
        if kinds[carry.inside] != "written" or not isinstance(write, Equation):
            continue
        _, slot, *starts = write.inputs
        if isinstance(slot, Lit) or starts[0] != loop.index or not all(map(_is_zero, starts[1:])):
            continue
        made = made_by.get(slot)
        if isinstance(made, Equation) and made.primitive == "broadcast_in_dim":
            found[carry.result] = (slot, made.inputs[0])
    return found


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Lit) and int(operand.value) == 0


# --- the second loop ------------------------------------------------------------------------------


def _reversed_positions(loop: Loop) -> dict[Var, Equation]:
    """The equations `length - 1 - index`, by their results."""
    return {
        step.outputs[0]: step
        for step in loop.body
        if isinstance(step, Equation)
        and step.primitive == "sub"
        and isinstance(step.inputs[0], Lit)
        and step.inputs[1] == loop.index
        and int(step.inputs[0].value) == loop.length - 1
    }


@dataclass(frozen=True, slots=True)
class _Transpose:
    """A loop whose iterations count down by `positions`."""

    loop: Loop
    positions: Mapping[Var, Equation]

    def may_run_forward(self) -> bool:
        """Whether its iterations may run in the other order."""
        kinds = classify_carries(self.loop, {}).values()
        return bool(self.positions) and all(kind in ("accumulated", "written") for kind in kinds)

    def reads_only_own_slots(self, stacks: Mapping[Var, tuple[Var, Operand]]) -> bool:
        """Whether it reads of every stack only the slot of its own iteration."""
        own = set()
        for step in self.loop.body:
            if isinstance(step, Equation) and self._is_slot(step) and step.inputs[0] in stacks:
                own.add(step.serial)
            elif _reads(step) & stacks.keys():
                return False
        return bool(own)

    def _is_slot(self, step: Equation) -> bool:
        if step.primitive != "dynamic_slice":
            return False
        _, position, *starts = step.inputs
        sizes = step.eqn.params["slice_sizes"]
        return sizes[0] == 1 and position in self.positions and all(map(_is_zero, starts))

    def at(self, index: Var, stacks: Mapping[Var, tuple[Var, Operand]]) -> Loop:
        """The loop for iteration `index` of the other one, on that one's own values."""
        new: dict[Var, Operand] = dict.fromkeys(self.positions, index)
        slots: dict[Var, Operand] = {}
        kept: list[Step] = []
        for step in self.loop.body:
            if isinstance(step, Loop):
                kept.append(step)
                continue
            first = step.inputs[0] if step.inputs else None
            read = -1 if first is None or isinstance(first, Lit) else first
            if read in stacks and self._is_slot(step):
                new[step.outputs[0]], slots[step.outputs[0]] = stacks[read]
            elif read in slots and step.primitive == "squeeze":
                new[step.outputs[0]] = slots[read]
            elif step.outputs[0] not in self.positions:
                kept.append(step)
        (loop,) = substitute((replace(self.loop, body=tuple(kept)),), new)
        assert isinstance(loop, Loop)
        if self.loop.index not in free_variables(loop.body):
            return loop
        # the index that counts up is now computed from the one that counts down
        position = next(iter(self.positions.values()))
        up = replace(position, inputs=(position.inputs[0], index), outputs=(self.loop.index,))
        return replace(loop, body=(up, *loop.body))
