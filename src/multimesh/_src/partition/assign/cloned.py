"""Equations that are cloned into every task that uses them, instead of being placed.

    mask = iota < n          # floating: no placed operand, cheap
    y = task0(x, mask)  ;  z = task1(y, mask)       # each makes its own mask
    b = broadcast(s)         # light: moving `s` is never dearer than moving `b`
    x = batch[i]             # light: all slices together are the batch, which then moves once
    w' = constraint w        # light in a loop: each task lays out the parameter as it needs it

*Floating* equations read only literals, loop indices, small arguments and other floating
equations, have no effect, and cost no more than the user's cut-off together with all they read.
*Light* equations rearrange or repeat one operand, make one number of another, or take from a value
that is made outside the loop the slice of each iteration, or another layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from multimesh._src.ir.constraint import constraint_p, is_layout
from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Step, Var
from multimesh._src.jax_compat import jaxprs
from multimesh._src.jax_compat.effects import calls_host

_FREE = frozenset(("iota", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"))
_LIGHT = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims"))
_RANDOM = frozenset(("random_bits", "threefry2x32", "random_fold_in", "random_split"))
RANDOM_WEIGHT = 100  # element operations of one random word


@dataclass(frozen=True, slots=True)
class Cloned:
    """Serials of the equations that tasks clone, and the cost of the floating variables.

    `shared` are those that one task of each submesh makes for all (`assign.shared`).
    """

    floating: frozenset[int]
    light: frozenset[int]
    variables: Mapping[Var, int]
    shared: frozenset[int] = frozenset()

    def __contains__(self, serial: int) -> bool:
        return serial in self.floating or serial in self.light


def find_cloned(
    program: FlatProgram, *, fixed: frozenset[Var], max_cost: int, max_elements: int
) -> Cloned:
    """Finds floating and light equations.

    Args:
        program: The flat program.
        fixed: Arguments that a caller placed on a submesh: never floating.
        max_cost: Element operations that may be done again in each task.
        max_elements: Arguments and constants of at most this size are on every submesh.
    """
    small = {
        var
        for var in (*program.arguments, *program.constants)
        if program.avals[var].size <= max(1, max_elements) and var not in fixed
    }
    costs: dict[Var, int] = dict.fromkeys(small, 0)
    light: set[int] = set()
    floating: set[int] = set()
    _visit(program.steps, program.avals, costs, floating, light, max_cost)
    for step in program.steps:
        light |= _of_outside(step, program.avals) - floating
    return Cloned(frozenset(floating), frozenset(light), costs)


def _visit(
    steps: tuple[Step, ...],
    avals: Mapping[Var, Any],
    costs: dict[Var, int],
    floating: set[int],
    light: set[int],
    max_cost: int,
) -> None:
    for step in steps:
        if isinstance(step, Loop):
            costs[step.index] = 0
            _visit(step.body, avals, costs, floating, light, max_cost)
            continue
        if calls_host(step.eqn) or _is_placed(step):
            continue
        reads = [v for v in step.inputs if not isinstance(v, Lit)]
        if all(var in costs for var in reads):
            cost = cost_of(step.eqn) + sum(costs[var] for var in dict.fromkeys(reads))
            if cost <= max_cost:
                floating.add(step.serial)
                costs.update(dict.fromkeys(step.outputs, cost))
                continue
        if (
            step.chooses is None
            and len(reads) == 1
            and (step.primitive in _LIGHT or _is_scalar(step, reads[0], avals))
        ):
            light.add(step.serial)


def _is_placed(step: Equation) -> bool:
    """Whether a step puts its result on a mesh of its own."""
    return step.eqn.primitive is constraint_p and step.eqn.params["mesh"] is not None


def _is_scalar(step: Equation, operand: Var, avals: Mapping[Var, Any]) -> bool:
    """Whether a step makes one number of another: `norm < 1.0` crosses as `norm`."""
    if step.primitive in ("add", "add_any"):
        return False  # a part of a sum, which may be regrouped
    sizes = [avals[var].size for var in (operand, *step.outputs)]
    return sizes == [1, 1] and cost_of(step.eqn) <= 1


def _of_outside(step: Step, avals: Mapping[Var, Any]) -> set[int]:
    """Serials of equations in loops that slice what is made outside, or give it a layout."""
    if not isinstance(step, Loop):
        return set()
    made = {step.index, *(carry.inside for carry in step.carries)}
    made.update(var for inner in step.body for var in inner.outputs)
    found: set[int] = set()
    for inner in step.body:
        if isinstance(inner, Loop):
            found |= _of_outside(inner, avals)
        elif not inner.inputs or isinstance(inner.inputs[0], Lit) or inner.inputs[0] in made:
            continue
        elif is_layout(inner.eqn) or _is_slice_of_turn(inner, step, avals):
            found.add(inner.serial)
    return found


def _is_slice_of_turn(equation: Equation, loop: Loop, avals: Mapping[Var, Any]) -> bool:
    """Whether an equation cuts the slice of the iteration; all together are no larger."""
    if equation.primitive != "dynamic_slice":
        return False
    stack, *starts = equation.inputs
    assert not isinstance(stack, Lit)
    at_index = loop.index in starts and all(
        start == loop.index or isinstance(start, Lit) for start in starts
    )
    return at_index and loop.length * avals[equation.outputs[0]].size <= avals[stack].size


def cost_of(eqn: Any) -> int:
    """Estimated element operations of one equation, inner jaxprs included."""
    name = eqn.primitive.name
    if name in _FREE:
        return 0
    inner = jaxprs.sub_jaxprs(eqn.params)
    if inner:
        trips = eqn.params.get("length", 1) if name == "scan" else 1
        return trips * sum(cost_of(e) for jaxpr in inner for e in jaxprs.open_jaxpr(jaxpr).eqns)
    elements = sum(var.aval.size for var in eqn.outvars)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * elements * prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * elements * kernel.size // max(1, features)
    if name in _RANDOM:
        return RANDOM_WEIGHT * elements
    if name.startswith(("reduce", "arg", "cum", "sort")):
        return sum(atom.aval.size for atom in eqn.invars)
    return elements
