"""Moves what makes values larger to where they are read, so that less crosses.

    h = up(x)              # seed: stage=1                 h : stage=1
    u = repeat(h, 4)       # no seed, placed at h          u : stage=1  ->  stage=2
    z = conv(u)            # seed: stage=2                 z : stage=2      h crosses, not u

Placement goes from operands to results, so a chain of operations that grow a value step by step
stays where it begins. Here, from the end of each loop body or program to its beginning, whatever
no seed decides moves to the one submesh that reads it where strictly fewer bytes then cross: an
operand that goes there anyway costs nothing. A sum of gradients moves also where it costs the same:
what is behind it may then follow. Contractions stay: what they cost is time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from multimesh._src.ir.flat import Equation, FlatProgram, Lit, Loop, Step, Var
from multimesh._src.ir.submesh import Submesh
from multimesh._src.partition.assign.cloned import Cloned
from multimesh._src.partition.backward import CONTRACTIONS
from multimesh._src.partition.prune import has_effect


def move_to_readers(
    program: FlatProgram,
    place: Mapping[int, int],
    seeded: Mapping[int, int],
    cloned: Cloned,
    submeshes: Sequence[Submesh],
) -> dict[int, int]:
    """Returns the submesh of each equation, by serial, after the moves.

    Args:
        program: The flat program.
        place: Where its equations are.
        seeded: The submesh of each seed: those stay.
        cloned: Equations that tasks clone: they are nowhere.
        submeshes: All submeshes; nothing moves to a rotating one.
    """
    flow = _Flow(program, dict(place), cloned)
    flow.index(program.steps, -1)
    flow.keep(program.results)
    for equation in reversed(flow.equations):
        if equation.serial in seeded or not _may_move(equation, flow):
            continue
        there = flow.only_reader(equation)
        here = flow.place[equation.serial]
        if there is None or there == here or submeshes[there].rotation:
            continue
        gain = flow.crossing(equation, here) - flow.crossing(equation, there)
        if gain > 0 or (gain == 0 and equation.primitive == "add_any"):
            flow.place[equation.serial] = there
    return flow.place


def _may_move(equation: Equation, flow: "_Flow") -> bool:
    is_free = equation.serial in flow.place and equation.serial not in flow.cloned
    is_array = any(flow.program.avals[var].ndim > 0 for var in equation.outputs)
    return (
        is_free
        and is_array
        and equation.primitive not in CONTRACTIONS
        and not has_effect(equation)
        and not flow.kept.intersection(equation.outputs)
    )


@dataclass(slots=True)
class _Flow:
    """Who makes and who reads each variable.

    `region` has the serial of the loop in which an equation stands; `kept` what loops carry and
    what is returned.
    """

    program: FlatProgram
    place: dict[int, int]
    cloned: Cloned
    equations: list[Equation] = field(default_factory=list)
    makers: dict[Var, Equation] = field(default_factory=dict)
    readers: dict[Var, list[Equation]] = field(default_factory=lambda: defaultdict(list))
    region: dict[int, int] = field(default_factory=dict)
    kept: set[Var] = field(default_factory=set)

    def index(self, steps: Iterable[Step], region: int) -> None:
        for step in steps:
            if isinstance(step, Loop):
                for carry in step.carries:
                    self.keep((carry.init, carry.next))
                self.index(step.body, step.serial)
                continue
            self.equations.append(step)
            self.region[step.serial] = region
            self.makers.update(dict.fromkeys(step.outputs, step))
            for var in _variables(step):
                self.readers[var].append(step)

    def keep(self, operands: Iterable[Var | Lit]) -> None:
        self.kept.update(operand for operand in operands if not isinstance(operand, Lit))

    def only_reader(self, equation: Equation) -> int | None:
        """The one submesh that reads the results, by way of clones too; None if there are more."""
        found: set[int] = set()
        todo = list(equation.outputs)
        while todo:
            var = todo.pop()
            if var in self.kept:
                return None
            for reader in self.readers[var]:
                if self.region[reader.serial] != self.region[equation.serial]:
                    return None
                if reader.serial in self.cloned:
                    todo += reader.outputs
                else:
                    found.add(self.place[reader.serial])
            if len(found) > 1:
                return None
        return next(iter(found), None)

    def crossing(self, equation: Equation, place: int) -> int:
        """Bytes that cross because of an equation, if it is at a place."""
        there = self.only_reader(equation)
        size = 0 if there == place else sum(map(self._bytes, equation.outputs))
        return size + sum(
            self._bytes(var)
            for var in _variables(equation)
            if var not in self.cloned.variables and not self._is_at(var, place, equation)
        )

    def _is_at(self, var: Var, place: int, besides: Equation) -> bool:
        """Whether a variable is at a place anyway, made or read there by another equation."""
        maker = self.makers.get(var)
        while maker is not None and maker.serial in self.cloned.light:
            (var,) = _variables(maker)[:1]
            maker = self.makers.get(var)
        if maker is not None and self.place.get(maker.serial) == place:
            return True
        return any(
            reader.serial != besides.serial and self.place.get(reader.serial) == place
            for reader in self.readers[var]
            if reader.serial not in self.cloned
        )

    def _bytes(self, var: Var) -> int:
        aval = self.program.avals[var]
        return aval.size * aval.dtype.itemsize


def _variables(equation: Equation) -> tuple[Var, ...]:
    """The variables that an equation reads, each once."""
    return tuple(dict.fromkeys(v for v in equation.inputs if not isinstance(v, Lit)))
