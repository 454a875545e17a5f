"""Takes batch arguments in the form in which microbatches are slices: microbatch-major.

    batch: [8, 3]                                    batch: [4, 2, 3]     # stored so
    a = reshape[4, 2, 3] batch                 ->
    loop i < 4: x = slice a i ; ...                  loop i < 4: x = slice batch i ; ...

A contiguous slice of a sharded dim lies on few shards; with the microbatch dim in front and the
size dim sharded, every slice is spread over all of them (R10). Host arrays arrive in this form at
no cost. An argument that is read in several forms, cut or whole, is taken once in each: no program
could make one sharded form of the other without sending it. What is returned, or succeeded by a
result, keeps its one form if it is also read whole: else it would be cut anew at every call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.flat import (
    Equation,
    FlatProgram,
    Lit,
    Operand,
    Step,
    Var,
    step_inputs,
    substitute,
)
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.inline import last_serial


@dataclass(frozen=True, slots=True)
class Batch:
    """How an argument is stored microbatch-major: pieces, and the dim that was cut."""

    microbatches: int
    dim: int


def store_microbatch_major(
    program: FlatProgram, traced: TracedFunction
) -> tuple[FlatProgram, TracedFunction, dict[int, Batch]]:
    """Returns the program, the function, and how the arguments that are cut are stored.

    Batches are given by position. Where an argument is read in several forms, further arguments
    stand behind all others: the caller's argument `Argument.index` in another form.
    """
    reads = _Reads(program)
    storer = _Storer(dict(program.avals), num_steps=last_serial(program.steps) + 1)
    arguments = list(program.arguments)
    described = list(traced.arguments)
    batches: dict[int, Batch] = {}
    succeeded = {result.successor_of for result in traced.results}
    for position, argument in enumerate(program.arguments):
        cuts, is_read_whole = reads.cuts_of(argument)
        if is_read_whole and (position in succeeded or argument in program.results):
            continue
        forms: dict[Batch, Var] = {}
        for cut in cuts:
            if cut.batch not in forms:
                forms[cut.batch] = storer.new(storer.avals[cut.slices])
            storer.store(cut, forms[cut.batch])
        for number, (batch, form) in enumerate(forms.items()):
            if number == 0 and not is_read_whole:
                batches[position] = batch
                arguments[position] = form
                continue
            batches[len(arguments)] = batch
            arguments.append(form)
            described.append(traced.arguments[position])
    stored = replace(
        program,
        avals=storer.avals,
        arguments=tuple(arguments),
        steps=storer.rewritten(program.steps),
        results=tuple(map(storer.look, program.results)),
    )
    return stored, replace(traced, arguments=tuple(described)), batches


@dataclass(frozen=True, slots=True)
class _Cut:
    """One way from an argument to its slices.

    `shared` are constraints on the whole, which others may read too; `own` the reshape and what
    follows it.
    """

    shared: tuple[Equation, ...]
    own: tuple[Equation, ...]
    batch: Batch

    @property
    def slices(self) -> Var:
        return self.own[-1].outputs[0]


class _Reads:
    """Who reads the variables outside of loops, and how arguments are cut."""

    def __init__(self, program: FlatProgram) -> None:
        self._avals = program.avals
        self._results = {operand for operand in program.results if not isinstance(operand, Lit)}
        self._users: dict[Var, list[Step]] = {}
        for step in program.steps:
            for var in dict.fromkeys(v for v in step_inputs(step) if not isinstance(v, Lit)):
                self._users.setdefault(var, []).append(step)

    def cuts_of(self, argument: Var) -> tuple[list[_Cut], bool]:
        """The cuts of an argument, and whether it is also read in another way."""
        cuts: list[_Cut] = []
        is_read_whole = False
        todo: list[tuple[Var, tuple[Equation, ...]]] = [(argument, ())]
        while todo:
            var, shared = todo.pop()
            is_read_whole |= var in self._results
            for user in self._users.get(var, ()):
                if isinstance(user, Equation) and user.eqn.primitive is constraint_p:
                    todo.append((user.outputs[0], (*shared, user)))
                    continue
                own = tuple(self._preparations(user))
                batch = self._batch_of(own)
                if batch is None:
                    is_read_whole = True
                else:
                    cuts.append(_Cut(shared, own, batch))
        return cuts, is_read_whole

    def _preparations(self, user: Step) -> Iterator[Equation]:
        """What `microbatch` does with a batch, as far as nothing else reads what it makes."""
        while isinstance(user, Equation) and _is_preparation(user):
            yield user
            (var,) = user.outputs
            users = self._users.get(var, ())
            if len(users) != 1 or var in self._results:
                return
            (user,) = users

    def _batch_of(self, preparations: Sequence[Equation]) -> Batch | None:
        if not preparations or preparations[0].primitive != "reshape":
            return None
        reshape, *rest = preparations
        marker = next(m for c in reshape.scope.markers if (m := microbatch_marker(c)))
        transposes = [equation for equation in rest if equation.primitive == "transpose"]
        if len(transposes) > 1 or any(equation.primitive == "reshape" for equation in rest):
            return None
        dim = transposes[0].eqn.params["permutation"][0] if transposes else 0
        before = self._avals[_operand(reshape)].shape
        wanted = (*before[:dim], marker.num_microbatches, marker.size, *before[dim + 1 :])
        if tuple(reshape.eqn.params["new_sizes"]) != wanted:
            return None
        return Batch(marker.num_microbatches, dim)


def _is_preparation(equation: Equation) -> bool:
    if equation.eqn.primitive is constraint_p:
        return True
    marked = any(microbatch_marker(marker) for marker in equation.scope.markers)
    return marked and equation.primitive in ("reshape", "transpose")


def _operand(equation: Equation) -> Var:
    operand = equation.inputs[0]
    assert not isinstance(operand, Lit)
    return operand


@dataclass(slots=True)
class _Storer:
    """Rewrites a program so that slices are cut from arguments in their new forms."""

    avals: dict[Var, Any]
    num_steps: int
    replaced: dict[int, tuple[Equation, ...]] = field(default_factory=dict)
    alias: dict[Var, Var] = field(default_factory=dict)

    def new(self, aval: Any) -> Var:
        """A new variable."""
        var = len(self.avals)
        self.avals[var] = aval
        return var

    def store(self, cut: _Cut, form: Var) -> None:
        """Notes that the slices of a cut come from `form`, under the constraints on the way."""
        chain = (*cut.shared, *cut.own)
        constraints = [eqn for eqn in chain if eqn.eqn.primitive is constraint_p]
        made: list[Equation] = []
        aval, before = self.avals[cut.slices], form
        for number, equation in enumerate(constraints, 1):
            # the cut dim keeps its axes behind the new, unsharded dim in front
            dims = equation.eqn.params["dims"]
            dims = dims if len(dims) == len(aval.shape) else ((), *dims)
            eqn = jaxprs.replace_eqn(equation.eqn, params={**equation.eqn.params, "dims": dims})
            after = cut.slices if number == len(constraints) else self.new(aval)
            inputs, outputs = (before,), (after,)
            made.append(
                replace(equation, serial=self.num_steps, eqn=eqn, inputs=inputs, outputs=outputs)
            )
            self.num_steps += 1
            before = after
        if not constraints:
            self.alias[cut.slices] = form
        # What is shared stays; without other readers it is dead.
        self.replaced |= {equation.serial: () for equation in cut.own}
        self.replaced[cut.own[-1].serial] = tuple(made)

    def look(self, operand: Operand) -> Operand:
        """What stands for an operand."""
        return operand if isinstance(operand, Lit) else self.alias.get(operand, operand)

    def rewritten(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """The program outside of loops with what was noted."""
        if not self.replaced:
            return steps
        kept = (
            new
            for step in steps
            for new in (
                self.replaced.get(step.serial, (step,)) if isinstance(step, Equation) else (step,)
            )
        )
        return substitute(tuple(kept), self.alias)
