"""What a loop does with the values that it carries.

    acc' = acc + g(i)            accumulated: any order of iterations gives the sum
    out' = write out, y(i), i    written: each iteration has its own slot
    last' = y(i)                 last: only the last iteration's value is read
    mean' = f(mean, x(i))        state: iteration i needs iteration i - 1

A loop is a microbatch loop, free to be reordered by a schedule, when every carry is of the first
three kinds or is a state that one forward stage alone reads and writes (R11).
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from multimesh._src.ir.flat import Carry, Equation, Lit, Loop, Step, Var, producers, step_inputs

CarryKind: TypeAlias = Literal["accumulated", "written", "last", "state"]

_COMMUTATIVE = frozenset(("add", "add_any", "mul", "max", "min", "and", "or", "xor"))


def classify_all(steps: tuple[Step, ...], place: Mapping[int, int]) -> dict[Var, CarryKind]:
    """Gives the kind of every carry of the loops among `steps`, at any depth."""
    kinds: dict[Var, CarryKind] = {}
    for step in steps:
        if isinstance(step, Loop):
            kinds |= classify_carries(step, place) | classify_all(step.body, place)
    return kinds


def classify_carries(loop: Loop, place: Mapping[int, int]) -> dict[Var, CarryKind]:
    """Gives the kind of every carry, by its variable inside the loop.

    Args:
        loop: The loop; `place` has the submesh of each of its equations, by serial.
        place: An accumulation whose additions lie on two submeshes is a state.
    """
    users: dict[Var, list[Equation | Loop | Carry]] = {}
    for step in loop.body:
        reads = step_inputs(step) if isinstance(step, Equation) else ()
        for var in reads:
            if not isinstance(var, Lit):
                users.setdefault(var, []).append(step)
    for step in loop.body:
        if isinstance(step, Loop):
            for carry in (c for c in loop.carries if _reads(step, c.inside)):
                users.setdefault(carry.inside, []).append(step)
    for carry in loop.carries:
        if not isinstance(carry.next, Lit):
            users.setdefault(carry.next, []).append(carry)
    made_by = producers(loop.body)
    return {carry.inside: _kind(carry, users, loop, made_by, place) for carry in loop.carries}


def _reads(loop: Loop, var: Var) -> bool:
    inits = any(carry.init == var for carry in loop.carries)
    return inits or any(
        _reads(step, var) if isinstance(step, Loop) else var in step_inputs(step)
        for step in loop.body
    )


def _kind(
    carry: Carry,
    users: Mapping[Var, list[Equation | Loop | Carry]],
    loop: Loop,
    made_by: Mapping[Var, Step],
    place: Mapping[int, int],
) -> CarryKind:
    if carry.inside not in users:
        return "last"
    chain = accumulation_chain(carry, users)
    if not chain:
        return "state"
    if chain[0].primitive == "dynamic_update_slice":
        own_slot = len(chain) == 1 and _writes_own_slot(chain[0], loop.index, made_by)
        return "written" if own_slot else "state"
    one_operation = len({_operation(eq) for eq in chain}) == 1
    one_place = len({place.get(eq.serial) for eq in chain}) == 1
    return "accumulated" if one_operation and one_place else "state"


def _operation(equation: Equation) -> str:
    return "add" if equation.primitive == "add_any" else equation.primitive


def accumulation_chain(
    carry: Carry, users: Mapping[Var, list[Equation | Loop | Carry]]
) -> tuple[Equation, ...]:
    """The equations from the carried value to its next one, each the only reader of the one before.

    Empty when there is another reader on the way, or an equation that neither combines nor writes.
    """
    chain: list[Equation] = []
    var = carry.inside
    while True:
        readers = users.get(var, [])
        if len(readers) != 1:
            return ()
        (reader,) = readers
        if isinstance(reader, Carry):
            return tuple(chain) if reader is carry else ()
        if isinstance(reader, Loop) or not _continues(reader, var):
            return ()
        chain.append(reader)
        (var,) = reader.outputs


def _continues(equation: Equation, var: Var) -> bool:
    if equation.primitive == "dynamic_update_slice":
        return equation.inputs[0] == var and var not in equation.inputs[1:]
    if equation.primitive not in _COMMUTATIVE:
        return False
    return sum(operand == var for operand in equation.inputs) == 1


def _writes_own_slot(equation: Equation, index: Var, made_by: Mapping[Var, Step]) -> bool:
    """Whether the write goes to a place that depends on the loop index."""
    todo = [v for v in equation.inputs[2:] if not isinstance(v, Lit)]
    found_index = False
    while todo:
        var = todo.pop()
        if var == index:
            found_index = True
            continue
        step = made_by.get(var)
        if step is None:
            continue
        if isinstance(step, Loop) or step.primitive not in ("sub", "squeeze", "slice"):
            return False
        todo += [v for v in step.inputs if not isinstance(v, Lit)]
    return found_index
