"""What a region of the program makes, who reads it, and what may move: the input of `glue`.

    loop: y = layer0(x[i])                  value y: made by layer0, read by sin and layer1
          s = sin y        # no seed        value s: made by sin, read by layer1
          z = layer1(y, s)                  free: sin

Clones are looked through, and additions to accumulators left out: each submesh has its own
accumulator, so their terms are not sent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from multimesh._src.ir.flat import Equation, Lit, Loop, Step, Var
from multimesh._src.partition.prune import has_effect
from multimesh._src.partition.split.regions import Flow


@dataclass(slots=True)
class Value:
    """A variable, the serials of what makes and reads it, and its bytes; 0 if it is everywhere.

    `home` is the submesh of an argument that its caller placed, `wanted` where results are wanted.
    """

    bytes: int
    made_here: bool
    maker: int | None = None
    home: int | None = None
    readers: dict[int, None] = field(default_factory=dict[int, None])
    wanted: tuple[int, ...] = ()
    is_scalar: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """The outer program or a loop body: what may move, and the values between equations.

    `values_of` has the positions of the values that a free equation makes or reads; `order` every
    equation, in program order, with those that it reads from; `forward` those that no transposed
    one comes before. All equations are named by serials.
    """

    free: frozenset[int]
    values: tuple[Value, ...]
    values_of: Mapping[int, tuple[int, ...]]
    order: tuple[tuple[int, tuple[int, ...]], ...]
    forward: frozenset[int]


def regions_of(steps: tuple[Step, ...]) -> Iterator[tuple[Loop | None, tuple[Step, ...]]]:
    """Loops from the inside, then the program: what is around a loop follows it."""

    def loops(steps: tuple[Step, ...]) -> Iterator[tuple[Loop | None, tuple[Step, ...]]]:
        for step in steps:
            if isinstance(step, Loop):
                yield from loops(step.body)
                yield step, step.body

    yield from loops(steps)
    yield None, steps


@dataclass(slots=True)
class RegionReader:
    """Collects the values of one region.

    Attributes:
        avals: Types of the program's variables.
        flow: Its dataflow, and its clones.
        seeded: Equations that stay where they are, by serial.
        arguments: Submesh of each argument that the caller placed.
        wanted: Submeshes where results are wanted.
        additions: Additions to accumulators, by serial.
        values: What was found so far.
        made_by: The serial of the equation that makes a variable.
        hidden: Variables that only loops inside the region see.
    """

    avals: Mapping[Var, Any]
    flow: Flow
    seeded: Mapping[int, int]
    arguments: Mapping[Var, int]
    wanted: Mapping[Var, tuple[int, ...]]
    additions: frozenset[int]
    values: dict[Var, Value] = field(default_factory=dict[Var, Value])
    made_by: dict[Var, int] = field(default_factory=dict[Var, int])
    hidden: set[Var] = field(default_factory=set[Var])

    def read(self, loop: Loop | None, steps: tuple[Step, ...]) -> Region:
        """Reads all steps of the region, loops inside it included."""
        self._note_makers(steps)
        states = set() if loop is None else self._note_carries(loop)
        free: set[int] = set()
        order: list[tuple[int, tuple[int, ...]]] = []
        backward: set[int] = set()
        for step, is_inside in _anchored(steps, self.flow, inside=False):
            if step.serial in self.additions:
                continue
            read = [var for var in self.flow.imports(step) if var not in self.hidden]
            for var in read:
                self._value(var).readers[step.serial] = None
            if not is_inside and self._may_move(step) and states.isdisjoint((*read, *step.outputs)):
                free.add(step.serial)
            makers = dict.fromkeys(self.made_by[var] for var in read if var in self.made_by)
            order.append((step.serial, tuple(makers)))
            if step.scope.transposes or not backward.isdisjoint(makers):
                backward.add(step.serial)
        for var in self.wanted if loop is None else ():
            if var in self.made_by:
                self._value(var).wanted = self.wanted[var]
        values = tuple(self.values.values())
        values_of: dict[int, list[int]] = {serial: [] for serial in free}
        for position, value in enumerate(values):
            for serial in dict.fromkeys((value.maker, *value.readers)):
                if serial in values_of:
                    values_of[serial].append(position)
        of = {serial: tuple(positions) for serial, positions in values_of.items()}
        forward = frozenset(serial for serial, _ in order if serial not in backward)
        return Region(frozenset(free), values, of, tuple(order), forward)

    def _note_carries(self, loop: Loop) -> set[Var]:
        """Returns what carries hold that only one stage may read and write: they are no sums."""
        self.hidden.add(loop.index)
        states: set[Var] = set()
        for carry in loop.carries:
            maker = None if isinstance(carry.next, Lit) else self.made_by.get(carry.next)
            if maker is not None:
                self.made_by[carry.inside] = maker
            if maker not in self.additions:
                states.add(carry.inside)
                states.update(() if isinstance(carry.next, Lit) else (carry.next,))
        return states

    def _may_move(self, step: Equation) -> bool:
        if step.serial in self.seeded or step.serial in self.flow.cloned:
            return False
        return bool(step.outputs) and not has_effect(step)

    def _note_makers(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if not isinstance(step, Loop):
                self.made_by.update(dict.fromkeys(step.outputs, step.serial))
                continue
            self.hidden.add(step.index)
            inner = RegionReader(self.avals, self.flow, self.seeded, {}, {}, frozenset())
            inner._note_makers(step.body)
            self.hidden |= {*inner.hidden, *inner.made_by}
            for carry in step.carries:
                self.hidden.add(carry.inside)
                if not isinstance(carry.next, Lit) and carry.next in inner.made_by:
                    self.made_by[carry.result] = inner.made_by[carry.next]

    def _value(self, var: Var) -> Value:
        if var not in self.values:
            aval, maker = self.avals[var], self.made_by.get(var)
            small = maker is None and var in self.flow.cloned.variables  # is everywhere
            size = 0 if small else aval.size * aval.dtype.itemsize
            scalar = aval.ndim == 0
            home = self.arguments.get(var)
            value = Value(size, maker is not None, maker, home, is_scalar=scalar)
            self.values[var] = value
        return self.values[var]


def _anchored(
    steps: tuple[Step, ...], flow: Flow, *, inside: bool
) -> Iterator[tuple[Equation, bool]]:
    """Equations that belong to tasks, and whether they lie in a loop inside the region."""
    for step in steps:
        if isinstance(step, Loop):
            yield from _anchored(step.body, flow, inside=True)
        elif step.serial in flow.anchored:
            yield step, inside
