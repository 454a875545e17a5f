"""Finds the stacks of a program: arrays `[L, ...]` whose rows are read on several submeshes.

    w: f32[4,8,8]   x = layer0(x, w[0]) @0 ; x = layer1(x, w[1]) @1 ; ...
    g = concatenate dw0 dw1 ... ; m' = 0.9 m + g ; w' = w - m'     ->    family {w, g, m, m', w'}

Arrays that are combined row by row form a *family*: they are kept alike, or rows would move in the
optimizer. A family with an array that something needs as a whole is kept on one submesh.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from multimesh._src.ir.flat import Carry, Equation, FlatProgram, Lit, Loop, Step, Var
from multimesh._src.partition.stacks.rows import Relation, relation_of, rows_of_read

_MAX_LOOK_AHEAD = 64
"""How many values are looked at to find who uses a row."""


@dataclass(frozen=True, slots=True)
class Read:
    """Rows that are read: of what array, cast or carried as it may be, and who uses them."""

    equation: Equation
    origin: Var
    users: tuple[int, ...]

    @property
    def rows(self) -> range:
        """The rows."""
        return rows_of_read(self.equation)


@dataclass(slots=True)
class Family:
    """Arrays that are combined row by row.

    Attributes:
        num_rows: The size of their first dim.
        arguments: Those that are arguments of the program and not small.
        reads: Where rows are read.
        joins: Where rows come together.
        whole: What needs an array as a whole, if anything does.
        in_pieces: Whether rows come together inside of a loop that adds them up or reads them.
    """

    num_rows: int
    arguments: list[Var] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    joins: list[Equation] = field(default_factory=list)
    whole: Equation | None = None
    in_pieces: bool = False

    @property
    def submeshes(self) -> tuple[int, ...]:
        """The submeshes that use rows, those that use most first."""
        rows: dict[int, set[int]] = {}
        for read in self.reads:
            for user in read.users:
                rows.setdefault(user, set()).update(read.rows)
        return tuple(sorted(rows, key=lambda submesh: -len(rows[submesh])))


@dataclass(frozen=True, slots=True)
class Families:
    """All families by number, and the number of each variable's."""

    families: Mapping[int, Family]
    of: Mapping[Var, int]


def find_families(
    program: FlatProgram,
    candidates: frozenset[Var],
    alike: Sequence[tuple[Var, Var]],
    seeded: Mapping[int, int],
    small: int,
) -> Families:
    """Returns the families that hold a candidate, or that come together inside of a loop.

    Args:
        program: The flat program.
        candidates: Arguments that may be stacks.
        alike: Arguments, and the results that take their place.
        seeded: Submesh of each seed, by serial.
        small: Arguments of at most so many elements stay whole.
    """
    search = _Search(program)
    search.visit(program.steps)
    for one, other in alike:
        search.join(one, other)
    pieces = {search.root(var) for var in search.joined_in_loops}
    pieces &= {search.root(var) for var in search.carried | search.read}
    roots = {search.root(var) for var in candidates} | pieces
    families: dict[int, Family] = {}
    of: dict[Var, int] = {}
    for var, aval in program.avals.items():
        root = search.root(var)
        if root in roots and aval.ndim:
            of[var] = root
            families.setdefault(root, Family(aval.shape[0], in_pieces=root in pieces))
    for var in program.arguments:
        if var in of and program.avals[var].size > small:
            families[of[var]].arguments.append(var)
    for equation, relation in search.related:
        _note(equation, relation, families, of, search, seeded)
    for var, equation in search.whole.items():
        if var in of and families[of[var]].whole is None:
            families[of[var]].whole = equation
    return Families(families, of)


def _note(
    equation: Equation,
    relation: Relation,
    families: Mapping[int, Family],
    of: Mapping[Var, int],
    search: "_Search",
    seeded: Mapping[int, int],
) -> None:
    (output,) = equation.outputs
    if relation.kind == "join" and output in of:
        families[of[output]].joins.append(equation)
    if relation.kind == "read":
        (stack,) = equation.inputs
        if not isinstance(stack, Lit) and stack in of:
            users = tuple(search.users_of(output, seeded))
            families[of[stack]].reads.append(Read(equation, search.origin(stack), users))


@dataclass(slots=True)
class _Search:
    """Which variables are combined row by row, and who reads what."""

    program: FlatProgram
    parent: dict[Var, Var] = field(default_factory=dict)
    users: dict[Var, list[Equation | Carry]] = field(default_factory=dict)
    related: list[tuple[Equation, Relation]] = field(default_factory=list)
    whole: dict[Var, Equation] = field(default_factory=dict)
    made_of: dict[Var, Var] = field(default_factory=dict)
    carried: set[Var] = field(default_factory=set)
    read: set[Var] = field(default_factory=set)
    joined_in_loops: set[Var] = field(default_factory=set)

    def root(self, var: Var) -> Var:
        parent = self.parent
        while parent.get(var, var) != var:
            parent[var] = parent.get(parent[var], parent[var])
            var = parent[var]
        return var

    def join(self, one: Var, other: Var) -> None:
        self.parent[self.root(one)] = self.root(other)

    def origin(self, var: Var) -> Var:
        """What a variable was before it was carried into loops or changed element by element."""
        while var in self.made_of:
            var = self.made_of[var]
        return var

    def visit(self, steps: tuple[Step, ...], *, in_loop: bool = False) -> None:
        for step in steps:
            if isinstance(step, Loop):
                self.carried.update(carry.inside for carry in step.carries)
                for carry in step.carries:
                    if not isinstance(carry.init, Lit):
                        self.made_of[carry.inside] = carry.init
                    for end in (carry.init, carry.next, carry.result):
                        if not isinstance(end, Lit):
                            self.join(end, carry.inside)
                            self.users.setdefault(end, []).append(carry)
                self.visit(step.body, in_loop=True)
            else:
                self._equation(step, in_loop)

    def _equation(self, equation: Equation, in_loop: bool) -> None:
        relation = relation_of(equation, self.program.avals)
        reads = [(i, v) for i, v in enumerate(equation.inputs) if not isinstance(v, Lit)]
        for position, var in reads:
            self.users.setdefault(var, []).append(equation)
            if position in relation.aligned:
                if relation.kind == "rows":
                    self.join(var, equation.outputs[0])
                    if len(relation.aligned) == 1:
                        self.made_of[equation.outputs[0]] = var
            elif self.program.avals[var].ndim and relation.kind != "read":
                self.whole.setdefault(var, equation)
        if relation.kind in ("join", "read"):
            self.related.append((equation, relation))
        if relation.kind == "join" and in_loop:
            self.joined_in_loops.update(equation.outputs)
        if relation.kind == "read":
            self.read.update(v for _, v in reads)

    def users_of(self, var: Var, seeded: Mapping[int, int]) -> Iterator[int]:
        """The submeshes of the nearest seeds that use a variable, by way of arrays of one row."""
        avals = self.program.avals
        todo, seen = deque((var,)), {var}
        found: dict[int, None] = {}
        while todo and len(seen) < _MAX_LOOK_AHEAD:
            for user in self.users.get(todo.popleft(), ()):
                if isinstance(user, Carry):
                    new = [user.inside, user.result]
                elif user.serial in seeded:
                    found[seeded[user.serial]] = None
                    continue
                else:
                    joins = relation_of(user, avals).kind == "join"
                    new = [] if joins else list(user.outputs)
                new = [v for v in new if v not in seen and avals[v].ndim]
                todo += new
                seen.update(new)
        yield from found
