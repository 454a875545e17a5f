"""Takes batch arguments in the form in which microbatches are slices: microbatch-major.

    batch: [8, 3]                                    batch: [4, 2, 3]     # stored so
    a = reshape[4, 2, 3] batch                 ->
    loop i < 4: x = slice a i ; ...                  loop i < 4: x = slice batch i ; ...

A contiguous slice of a sharded dim lies on few shards; with the microbatch dim in front and the
size dim sharded, every slice is spread over all of them (R10). Host arrays arrive in this
form at no cost. An argument that is also read in another way stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Step, Var, step_inputs
from multimesh._src.jax_compat import jaxprs


@dataclass(frozen=True, slots=True)
class Batch:
    """How an argument is stored microbatch-major: pieces, and the dim that was cut."""

    microbatches: int
    dim: int


def store_microbatch_major(program: FlatProgram) -> tuple[FlatProgram, dict[int, Batch]]:
    """Returns the program and how each changed argument, by position, is stored."""
    users: dict[Var, list[Step]] = {}
    for step in program.steps:
        for var in dict.fromkeys(v for v in step_inputs(step) if not isinstance(v, Lit)):
            users.setdefault(var, []).append(step)
    avals = dict(program.avals)
    arguments = list(program.arguments)
    replaced: dict[int, Equation | None] = {}
    batches: dict[int, Batch] = {}
    results = {operand for operand in program.results if not isinstance(operand, Lit)}
    for position, argument in enumerate(program.arguments):
        chain = _chain_to_loop(argument, users, results)
        cut = _cut_of(chain, program) if chain else None
        if cut is None:
            continue
        batches[position] = cut
        arguments[position] = _store(chain, avals, replaced)
    steps = tuple(
        kept
        for step in program.steps
        if (kept := replaced.get(step.serial, step) if isinstance(step, Equation) else step)
    )
    stored = replace(program, avals=avals, arguments=tuple(arguments), steps=steps)
    return stored, batches


def _chain_to_loop(
    argument: Var, users: dict[Var, list[Step]], results: set[Var]
) -> tuple[Equation, ...]:
    """The constraints, reshape and transpose between an argument and its loop."""
    chain: list[Equation] = []
    var = argument
    while len(users.get(var, ())) == 1 and var not in results:
        (user,) = users[var]
        if isinstance(user, Loop) or not _is_preparation(user):
            break
        chain.append(user)
        (var,) = user.outputs
    return tuple(chain)


def _is_preparation(equation: Equation) -> bool:
    if equation.eqn.primitive is constraint_p:
        return True
    marked = any(microbatch_marker(marker) for marker in equation.scope.markers)
    return marked and equation.primitive in ("reshape", "transpose")


def _cut_of(chain: Sequence[Equation], program: FlatProgram) -> Batch | None:
    reshapes = [equation for equation in chain if equation.primitive == "reshape"]
    if len(reshapes) != 1:
        return None
    (reshape,) = reshapes
    marker = next(m for c in reshape.scope.markers if (m := microbatch_marker(c)))
    transposes = [equation for equation in chain if equation.primitive == "transpose"]
    if len(transposes) > 1 or any(
        eq.primitive == "reshape" for eq in chain[chain.index(reshape) + 1 :]
    ):
        return None
    dim = transposes[0].eqn.params["permutation"][0] if transposes else 0
    before = program.avals[_operand(reshape)].shape
    wanted = (*before[:dim], marker.num_microbatches, marker.size, *before[dim + 1 :])
    if tuple(reshape.eqn.params["new_sizes"]) != wanted:
        return None
    return Batch(marker.num_microbatches, dim)


def _operand(equation: Equation) -> Var:
    operand = equation.inputs[0]
    assert not isinstance(operand, Lit)
    return operand


def _store(
    chain: Sequence[Equation],
    avals: dict[Var, Any],
    replaced: dict[int, Equation | None],
) -> Var:
    """Notes what becomes of the chain's equations, and returns the argument in its new form."""
    last = chain[-1].outputs[0]
    replaced |= {equation.serial: None for equation in chain}
    stored = last
    for equation in reversed(chain):
        if equation.eqn.primitive is not constraint_p:
            continue
        # the cut dim keeps its axes behind the new, unsharded dim in front
        dims = equation.eqn.params["dims"]
        if len(dims) < len(avals[last].shape):
            dims = ((), *dims)
        params = {**equation.eqn.params, "dims": dims}
        new = len(avals)
        avals[new] = avals[last]
        replaced[equation.serial] = replace(
            equation,
            eqn=jaxprs.replace_eqn(equation.eqn, params=params),
            inputs=(new,),
            outputs=(stored,),
        )
        stored = new
    return stored
