"""Opens remat regions, and where equations are compared calls too.

y = remat[{ a = sin x ; b = a * w }] x w     ->     a = sin x ; y = a * w
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multimesh._src.jax_compat import jaxprs

CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat_call")) | {
    "custom_jvp_call",
    "custom_vjp_call",
}
"""Primitives that run their first jaxpr once, and nothing else in a program that is not changed."""

_REMAT = frozenset(("checkpoint", "remat", "remat2"))


def is_remat(eqn: Any) -> bool:
    """Whether an equation is a remat region."""
    return eqn.primitive.name in _REMAT


def recomputes(eqn: Any) -> bool:
    """Whether an equation is a remat region that stands in a backward pass."""
    return is_remat(eqn) and eqn.params.get("differentiated", True)


def open_remat(jaxpr: Any) -> Any:
    """Returns a jaxpr, closed as it was, with its remat regions opened, those inside them too."""
    return _open(jaxpr, is_remat)


def _open(jaxpr: Any, opens: Callable[[Any], bool]) -> Any:
    if not any(map(opens, jaxpr.eqns)):
        return jaxpr
    env: dict[Any, Any] = {}
    eqns = list(_opened(jaxpr.eqns, env, opens))
    outvars = [_look(atom, env) for atom in jaxprs.open_jaxpr(jaxpr).outvars]
    return jaxprs.with_eqns(jaxpr, eqns, outvars)


def without_calls(eqn: Any) -> Any:
    """Returns an equation whose inner jaxprs, at any depth, hold no remat regions and no calls.

    Autodiff opens custom derivatives: only so is a forward pass like the one that is recomputed.
    """

    def opened(jaxpr: Any) -> Any:
        inner = _open(jaxpr, _is_call)
        eqns = [without_calls(eqn) for eqn in inner.eqns]
        same = all(new is old for new, old in zip(eqns, inner.eqns, strict=True))
        return inner if same else jaxprs.with_eqns(inner, eqns)

    return jaxprs.map_sub_jaxprs(eqn, opened)


def _is_call(eqn: Any) -> bool:
    if is_remat(eqn):
        return True
    inner = jaxprs.sub_jaxprs(eqn.params) if eqn.primitive.name in CALLS else ()
    return bool(inner) and not jaxprs.open_jaxpr(inner[0]).constvars


def _opened(
    eqns: Sequence[Any], env: dict[Any, Any], opens: Callable[[Any], bool]
) -> Iterator[Any]:
    """The equations, those that `opens` names replaced by their inside, in fresh variables."""
    for eqn in eqns:
        invars = [_look(atom, env) for atom in eqn.invars]
        if not opens(eqn):
            yield jaxprs.replace_eqn(eqn, invars=invars)
            continue
        inner = jaxprs.open_jaxpr(jaxprs.sub_jaxprs(eqn.params)[0])
        scope: dict[Any, Any] = dict(zip(inner.invars, invars, strict=True))
        inside: dict[Any, Any] = {}
        yield from _opened(jaxprs.fresh_eqns(inner.eqns, scope), inside, opens)
        outs = [atom if jaxprs.is_literal(atom) else scope[atom] for atom in inner.outvars]
        env.update(zip(eqn.outvars, (_look(atom, inside) for atom in outs), strict=True))


def _look(atom: Any, env: dict[Any, Any]) -> Any:
    return atom if jaxprs.is_literal(atom) else env.get(atom, atom)
