"""Where in the user's program a value is made and where it is read.

    with named_scope("down0"):  h = conv(x)        # unet.py:28, on stage=0
    h = concatenate([h, skips[0]])                 # unet.py:49, in scope `up0`, on stage=2
    ->  made_at(h) = Site("down0", unet.py:28)     used_at(h, stage=2) = Site("up0", unet.py:49)

What a loop carries is made where its next value is, and read where any of its forms is read. An
equation that tasks clone is passed through: what reads its result says where.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np

from multimesh._src.ir.flat import Carry, Equation, Lit, Loop, Step, Var, step_inputs
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.pipeline import Origins


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program.

    Attributes:
        scope: The scopes around it, as `model/layer0`; empty where there are none.
        backward: Whether autodiff made it of that place, for a gradient.
        line: The user's `file:line`, with the whole path; empty where unknown.
        is_sum: Whether autodiff adds up gradients there; its scope is that of one of the terms.
    """

    scope: str
    backward: bool
    line: str
    is_sum: bool = False

    def text(self, lines: "LineNames") -> str:
        """The place in words, as "`layer0` (model.py:12)"."""
        line = lines.short(self.line)
        scope = f"`{self.scope}`" if self.scope else ""
        if self.is_sum:
            scope = f"a sum of gradients of {scope or line or 'the program'}"
        elif self.backward:
            scope = f"the backward of {scope or line or 'the program'}"
        place = f"{scope} ({line})" if scope and line and line not in scope else scope or line
        return place or "the program"


def site_of(equation: Equation) -> Site:
    """Returns the place of an equation."""
    is_sum = equation.primitive == "add_any"
    return Site(str(equation.scope), equation.scope.backprop or is_sum, equation.line, is_sum)


@final
@dataclass(slots=True)
class Sites:
    """Looks up where values are made and read; nothing is computed before it is asked for."""

    origins: Origins
    submeshes: Sequence[Submesh]
    _makers: dict[Var, Step] = field(default_factory=dict)
    _readers: dict[Var, list[Equation]] = field(default_factory=dict)
    _carries: dict[Var, list[Carry]] = field(default_factory=dict)
    _made: dict[Var, Site | None] = field(default_factory=dict)
    _used: dict[tuple[Var, int], Site | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._note(self.origins.flat.steps)

    def _note(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._makers.update(dict.fromkeys(step.outputs, step))
            if isinstance(step, Loop):
                self._note(step.body)
                for carry in step.carries:
                    for form in (carry.init, carry.inside, carry.next, carry.result):
                        if not isinstance(form, Lit):
                            self._carries.setdefault(form, []).append(carry)
                continue
            for operand in step_inputs(step):
                if not isinstance(operand, Lit):
                    self._readers.setdefault(operand, []).append(step)

    def made_at(self, var: Var) -> Site | None:
        """Where a variable is made; None for arguments and what partitioning adds."""
        if var not in self._made:
            maker = self._maker(var)
            self._made[var] = None if maker is None else site_of(maker)
        return self._made[var]

    def _maker(self, var: Var) -> Equation | None:
        seen: set[Var] = set()
        while var not in seen:
            seen.add(var)
            maker = self._makers.get(var)
            if isinstance(maker, Equation):
                return maker
            after = next((c.next for c in self._carries.get(var, ()) if c.next != var), None)
            if after is None or isinstance(after, Lit):
                return None
            var = after
        return None

    def is_conditional(self, var: Var) -> bool:
        """Whether a conditional makes a variable, of nothing but zeros in one of its branches."""
        maker = self._maker(var)
        if maker is None or maker.primitive != "cond" or var not in maker.outputs:
            return False
        position = maker.outputs.index(var)
        return any(map(partial(_gives_zeros, position), maker.eqn.params["branches"]))

    def is_carried(self, var: Var) -> bool:
        """Whether a loop makes a variable as what it carries to its next iteration."""
        return any(var in (carry.next, carry.result) for carry in self._carries.get(var, ()))

    def used_at(self, var: Var, submesh: int) -> Site | None:
        """Where a variable is first read on a submesh; None where no equation reads it there."""
        if (var, submesh) not in self._used:
            reader = self._reader(var, submesh, set())
            self._used[var, submesh] = None if reader is None else site_of(reader)
        return self._used[var, submesh]

    def _reader(self, var: Var, submesh: int, seen: set[Var]) -> Equation | None:
        if var in seen:
            return None
        seen.add(var)
        readers = self._readers.get(var, [])
        own = next((eqn for eqn in readers if self._runs_on(eqn, submesh)), None)
        if own is not None:
            return own
        clones = [eqn for eqn in readers if eqn.serial in self.origins.clones]
        later = [form for eqn in clones for form in eqn.outputs]
        for carry in self._carries.get(var, ()):
            forms = (carry.inside, carry.result)
            later += [form for form in forms if var in (carry.init, carry.next)]
        found = (self._reader(form, submesh, seen) for form in later)
        return next((eqn for eqn in found if eqn is not None), None)

    def _runs_on(self, equation: Equation, submesh: int) -> bool:
        place = self.origins.place.get(equation.serial)
        if place is None or equation.serial in self.origins.clones:
            return False
        return submesh in (self.submeshes[place].rotation or (place,))


def _gives_zeros(position: int, branch: Any) -> bool:
    jaxpr = jaxprs.open_jaxpr(branch)
    result: Any = jaxpr.outvars[position]
    if not jaxprs.is_literal(result):
        makers = (eqn for eqn in jaxpr.eqns if result in eqn.outvars)
        filled = (eqn.invars[0] for eqn in makers if eqn.primitive.name == "broadcast_in_dim")
        result = next(filled, result)
    return jaxprs.is_literal(result) and not np.any(result.val)


@final
@dataclass(slots=True)
class LineNames:
    """Short names of lines: the file without its folders, as far as that says which one it is."""

    _names: Mapping[str, str]

    def short(self, line: str) -> str:
        """`/home/me/model.py:12` -> `model.py:12`."""
        return self._names.get(line, line)


def line_names(lines: Iterable[str]) -> LineNames:
    """Returns the short names of lines; files of one name keep as many folders as they need."""
    known = sorted({line for line in lines if line})
    files = {line.rpartition(":")[0] or line for line in known}
    short = {file: _short_file(file, files - {file}) for file in files}
    return LineNames({line: short.get(line) or _with_short_file(line, short) for line in known})


def _with_short_file(line: str, short: Mapping[str, str]) -> str:
    file, _, number = line.rpartition(":")
    return f"{short[file]}:{number}"


def _short_file(file: str, others: Iterable[str]) -> str:
    """The shortest end of a path that no other file has."""
    parts = file.replace(os.sep, "/").split("/")
    ends = [other.replace(os.sep, "/").split("/") for other in others]
    length = 1
    while length < len(parts) and any(end[-length:] == parts[-length:] for end in ends):
        length += 1
    return "/".join(parts[-length:])
