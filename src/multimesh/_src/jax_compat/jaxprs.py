"""Reading, building and rewriting jaxprs.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. What differs between them and is hidden here:

- Up to 0.10 a `ClosedJaxpr` wraps a `Jaxpr`; from 0.11 they are one class, `cj.jaxpr is cj`, and an
  open jaxpr with constvars is a jaxpr whose first inputs have no values attached.
- `scan` says `num_consts` and `num_carry` in 0.10, `ft_in` and `ft_out` from 0.11.
- Jaxprs without a `DebugInfo` warn.

Private names: `jax._src.core.{eval_jaxpr, Var, DebugInfo}` (for most `jax.extend.core` has the same
objects, and those are used), `jax._src.interpreters.partial_eval.make_jaxpr_effects`,
`jax._src.effects.JaxprInputEffect`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jax._src import core, effects
from jax._src.interpreters import partial_eval
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom: TypeAlias = Var | Literal
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
JaxprType = TypeVar("JaxprType", Jaxpr, ClosedJaxpr)


# --- reading -------------------------------------------------------------------------------------


def is_jaxpr(value: Any) -> bool:
    """Whether `value` is an open or closed jaxpr."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def is_literal(atom: Atom) -> bool:
    """Whether an operand or output of a jaxpr is a literal."""
    return isinstance(atom, Literal)


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """Returns the jaxpr that holds `constvars`, `invars`, `eqns` and `outvars`."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def consts_of(jaxpr: AnyJaxpr) -> tuple[Any, ...]:
    """Returns the values attached to the constvars; empty for an open jaxpr."""
    return tuple(getattr(jaxpr, "consts", ()))


def sub_jaxprs(params: Mapping[str, Any]) -> tuple[AnyJaxpr, ...]:
    """Returns the jaxprs held by the params of one equation, in order, not those inside them.

    They come as they are held (open or closed); tuples and lists of jaxprs are looked into.
    """
    return tuple(_jaxprs_in(tuple(params.values())))


def _jaxprs_in(value: Any) -> Iterator[AnyJaxpr]:
    if is_jaxpr(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs_in(item)


def all_eqns(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of `jaxpr` and of every jaxpr inside them, outer ones first.

    A jaxpr that several equations share is visited once per equation.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn.params):
            yield from all_eqns(inner)


def independent_results(jaxpr: AnyJaxpr) -> list[bool]:
    """Returns for each result whether it is computed from no argument and no const."""
    inner = open_jaxpr(jaxpr)
    dependent = {*inner.constvars, *inner.invars}
    for eqn in inner.eqns:
        if any(not is_literal(atom) and atom in dependent for atom in eqn.invars):
            dependent.update(eqn.outvars)
    return [is_literal(atom) or atom not in dependent for atom in inner.outvars]


_KEEPS_ZEROS = frozenset(
    ("broadcast_in_dim", "reshape", "transpose", "convert_element_type", "copy", "add_any", "neg")
)


def zero_results(jaxpr: AnyJaxpr) -> list[bool]:
    """Returns for each result whether it is plainly zero, as gradients of what is not read are."""
    zeros: set[Any] = set()

    def is_zero(atom: Any) -> bool:
        if is_literal(atom):
            return np.ndim(atom.val) == 0 and not np.any(atom.val)
        return atom in zeros

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _KEEPS_ZEROS and all(map(is_zero, eqn.invars)):
            zeros.update(eqn.outvars)
    return [is_zero(atom) for atom in open_jaxpr(jaxpr).outvars]


class ScanParts(NamedTuple):
    """A scan as (consts, carry, xs) -> (carry, ys). `jaxpr` takes one slice of each of `xs`."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    jaxpr: ClosedJaxpr


def scan_parts(eqn: JaxprEqn) -> ScanParts:
    """Returns how the operands and results of a `scan` equation are split."""
    params = eqn.params
    if "ft_in" in params:
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return ScanParts(num_consts, num_carry, params["length"], params["reverse"], params["jaxpr"])


def params_without_trees(eqn: JaxprEqn) -> Mapping[str, Any]:
    """Returns the params of an equation; of a scan's trees, which autodiff nests, the sizes."""
    if "ft_in" not in eqn.params:
        return eqn.params
    parts = scan_parts(eqn)
    kept = {name: value for name, value in eqn.params.items() if name not in ("ft_in", "ft_out")}
    return {**kept, "num_consts": parts.num_consts, "num_carry": parts.num_carry}


# --- building ------------------------------------------------------------------------------------


def new_var(aval: Any) -> Var:
    """Returns a fresh variable of type `aval`."""
    return core.Var(aval)


def literal(value: Any, aval: Any) -> Literal:
    """Returns a literal operand."""
    return Literal(value, aval)


def replace_eqn(
    eqn: JaxprEqn,
    *,
    invars: Sequence[Atom] | None = None,
    outvars: Sequence[Var] | None = None,
    params: Mapping[str, Any] | None = None,
    source_info: Any = None,
) -> JaxprEqn:
    """Returns `eqn` with some parts replaced; effects that name an operand follow it."""
    invars = eqn.invars if invars is None else list(invars)
    renamed = {
        old: new
        for old, new in zip(eqn.invars, invars, strict=True)
        if not is_literal(old) and not is_literal(new)
    }
    return eqn.replace(
        invars=invars,
        outvars=None if outvars is None else list(outvars),
        params=None if params is None else dict(params),
        effects=_rename_effects(eqn.effects, renamed),
        source_info=source_info,
    )


def _rename_effects(effs: Any, renamed: Mapping[Atom, Atom]) -> Any:
    if not any(isinstance(eff, effects.JaxprInputEffect) for eff in effs):
        return effs
    return {
        eff.replace(renamed.get(eff.input, eff.input))
        if isinstance(eff, effects.JaxprInputEffect)
        else eff
        for eff in effs
    }


def conditional(
    eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any], branches: Sequence[ClosedJaxpr]
) -> JaxprEqn:
    """Returns the conditional `eqn` with other branches, in fresh variables.

    Args:
        eqn: A `cond` equation: its params, context and source line are kept.
        operands: Types of the index and of what the branches take.
        results: Types of what the branches give.
        branches: The branches.
    """
    effs = {
        eff
        for branch in branches
        for eff in branch.effects
        if not isinstance(eff, effects.JaxprInputEffect)
    }
    return eqn.replace(
        invars=list(map(new_var, operands)),
        outvars=list(map(new_var, results)),
        params={**eqn.params, "branches": tuple(branches)},
        effects=effs,
    )


def debug_info(name: str, num_args: int, num_results: int) -> Any:
    """Returns the `DebugInfo` of a jaxpr that we make: only a name."""
    return core.DebugInfo("multimesh", name, ("",) * num_args, ("",) * num_results)


def new_jaxpr(
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    *,
    constvars: Sequence[Var] = (),
    name: str = "body",
) -> Jaxpr:
    """Returns an open jaxpr; its effects are those of its equations."""
    effs = effects_of(constvars, invars, outvars, eqns)
    info = debug_info(name, len(invars), len(outvars))
    return Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effs, info)


def effects_of(
    constvars: Sequence[Var],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
) -> Any:
    """Returns the effects of a jaxpr made of these equations."""
    return partial_eval.make_jaxpr_effects(constvars, invars, outvars, eqns)


def new_closed_jaxpr(
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    eqns: Sequence[JaxprEqn],
    *,
    constvars: Sequence[Var] = (),
    consts: Sequence[Any] = (),
    name: str = "body",
) -> ClosedJaxpr:
    """Returns a closed jaxpr; `consts` are the values of `constvars`."""
    if len(constvars) != len(consts):
        raise ValueError(f"`{len(constvars)}` constvars but `{len(consts)}` consts")
    return close(new_jaxpr(invars, outvars, eqns, constvars=constvars, name=name), consts)


def close(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> ClosedJaxpr:
    """Attaches the values of its constvars to an open jaxpr."""
    return ClosedJaxpr(jaxpr, list(consts))


def with_eqns(jaxpr: Any, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom] | None = None) -> Any:
    """Returns `jaxpr`, open or closed as it was, with other equations.

    Its inputs stay, and so do its results without `outvars`.
    """
    parts: dict[str, Any] = {"eqns": list(eqns)}
    if outvars is not None:
        parts["outvars"] = list(outvars)
    if isinstance(jaxpr, Jaxpr):
        return jaxpr.replace(**parts)
    return ClosedJaxpr(jaxpr.jaxpr.replace(**parts), jaxpr.consts)


class Part(NamedTuple):
    """The part of an equation that makes some of its outputs.

    `operands` and `outputs` are the positions that those of `eqn` have among those of the whole.
    """

    eqn: JaxprEqn
    operands: tuple[int, ...]
    outputs: tuple[int, ...]


def part_for(eqn: JaxprEqn, wanted: Sequence[int]) -> Part | None:
    """Returns the part of an equation that makes the outputs at `wanted`, by JAX's own rules.

    None where all of them are operands passed through.
    """
    invars = [new_var(atom.aval) for atom in eqn.invars]
    outvars = [new_var(var.aval) for var in eqn.outvars]
    renamed = replace_eqn(eqn, invars=invars, outvars=outvars)
    whole = new_jaxpr(invars, [outvars[position] for position in wanted], [renamed])
    part, _ = partial_eval.dce_jaxpr(whole, [True] * len(wanted), instantiate=True)
    if not part.eqns:
        return None
    found = part.eqns[0]
    operand: dict[Any, int] = {var: i for i, var in enumerate(invars)}
    output: dict[Any, int] = {var: i for i, var in enumerate(outvars)}
    return Part(
        found,
        tuple(operand[var] for var in found.invars),
        tuple(output.get(var, -1) for var in found.outvars),
    )


def fresh_eqns(eqns: Sequence[JaxprEqn], env: dict[Any, Atom]) -> list[JaxprEqn]:
    """Returns the equations in fresh variables.

    `env` says what stands for each variable that they read; what they make is added to it.
    """
    fresh: list[JaxprEqn] = []
    for eqn in eqns:
        reads = [atom if is_literal(atom) else env[atom] for atom in eqn.invars]
        results = [new_var(var.aval) for var in eqn.outvars]
        env.update(zip(eqn.outvars, results, strict=True))
        fresh.append(replace_eqn(eqn, invars=reads, outvars=results))
    return fresh


# --- rewriting -----------------------------------------------------------------------------------


def map_sub_jaxprs(eqn: JaxprEqn, fn: Callable[[AnyJaxpr], AnyJaxpr]) -> JaxprEqn:
    """Applies `fn` to each jaxpr held by the params of `eqn`, not to those inside them.

    `fn` gets them as they are held and returns the same kind. Where it returns each jaxpr itself,
    `eqn` is returned itself.
    """
    params = {key: _map_value(value, fn) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def _map_value(value: Any, fn: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
    if is_jaxpr(value):
        return fn(value)
    if type(value) in (tuple, list) and any(True for _ in _jaxprs_in(value)):
        mapped = [_map_value(item, fn) for item in value]
        same = all(new is old for new, old in zip(mapped, value, strict=True))
        return value if same else type(value)(mapped)
    return value


def map_eqns(jaxpr: JaxprType, fn: Callable[[JaxprEqn], JaxprEqn]) -> JaxprType:
    """Applies `fn` to every equation at any depth, inner ones first.

    `fn` may change primitive and params but keeps operands and results. What does not change is
    the same object afterwards, and a jaxpr shared by several equations stays shared (the caches of
    JAX go by identity).
    """
    done: dict[int, tuple[Any, Any]] = {}  # keeps the keys' objects alive

    def visit(inner: Any) -> Any:
        if id(inner) not in done:
            eqns = [fn(map_sub_jaxprs(eqn, visit)) for eqn in inner.eqns]
            same = all(new is old for new, old in zip(eqns, inner.eqns, strict=True))
            done[id(inner)] = (inner, inner if same else with_eqns(inner, eqns))
        return done[id(inner)][1]

    return visit(jaxpr)


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr; each equation keeps its context, source line and name stack."""
    return core.eval_jaxpr(open_jaxpr(jaxpr), list(consts_of(jaxpr)), *args)
