"""Opens remat regions.

y = remat[{ a = sin x ; b = a * w }] x w     ->     a = sin x ; y = a * w
"""

from collections.abc import Iterator, Sequence
from typing import Any

from multimesh._src.jax_compat import jaxprs

_REMAT = frozenset(("checkpoint", "remat", "remat2"))


def is_remat(eqn: Any) -> bool:
    """Whether an equation is a remat region."""
    return eqn.primitive.name in _REMAT


def recomputes(eqn: Any) -> bool:
    """Whether an equation is a remat region that stands in a backward pass."""
    return is_remat(eqn) and eqn.params.get("differentiated", True)


def open_remat(jaxpr: Any) -> Any:
    """Returns a jaxpr, closed as it was, with its remat regions opened, those inside them too."""
    if not any(map(is_remat, jaxpr.eqns)):
        return jaxpr
    env: dict[Any, Any] = {}
    eqns = list(_opened(jaxpr.eqns, env))
    outvars = [_look(atom, env) for atom in jaxprs.open_jaxpr(jaxpr).outvars]
    return jaxprs.with_eqns(jaxpr, eqns, outvars)


def without_remat(eqn: Any) -> Any:
    """Returns an equation whose inner jaxprs, at any depth, hold no remat regions."""

    def opened(jaxpr: Any) -> Any:
        inner = open_remat(jaxpr)
        eqns = [without_remat(eqn) for eqn in inner.eqns]
        same = all(new is old for new, old in zip(eqns, inner.eqns, strict=True))
        return inner if same else jaxprs.with_eqns(inner, eqns)

    return jaxprs.map_sub_jaxprs(eqn, opened)


def _opened(eqns: Sequence[Any], env: dict[Any, Any]) -> Iterator[Any]:
    """The equations with remat regions replaced by what is inside, in fresh variables."""
    for eqn in eqns:
        invars = [_look(atom, env) for atom in eqn.invars]
        if not is_remat(eqn):
            yield jaxprs.replace_eqn(eqn, invars=invars)
            continue
        inner = jaxprs.open_jaxpr(jaxprs.sub_jaxprs(eqn.params)[0])
        scope: dict[Any, Any] = dict(zip(inner.invars, invars, strict=True))
        inside: dict[Any, Any] = {}
        yield from _opened(jaxprs.fresh_eqns(inner.eqns, scope), inside)
        outs = [atom if jaxprs.is_literal(atom) else scope[atom] for atom in inner.outvars]
        env.update(zip(eqn.outvars, (_look(atom, inside) for atom in outs), strict=True))


def _look(atom: Any, env: dict[Any, Any]) -> Any:
    return atom if jaxprs.is_literal(atom) else env.get(atom, atom)
