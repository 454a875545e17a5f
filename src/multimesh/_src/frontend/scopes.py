"""Reads JAX's name stacks into scopes: the names that an equation stands under (R2).

A name stack mixes the user's scopes with wrappers: transformations (`jvp`, `transpose`, `vmap`) and
the scopes that JAX opens itself. Wrappers are not names. Transposed equations repeat the path of
the forward ones behind a wrapper; the repetition is folded:

    transpose(jvp(top))/layer1/jvp(top)/layer1/blk   ->   top/layer1/blk, one transpose
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from multimesh._src.ir.scope import Scope, repetition
from multimesh._src.jax_compat.name_stack import ambient_name_stack, components

MARKER_PREFIX = "multimesh:"
_WRAPPER_SCOPES = ("rematted_computation", "checkpoint")


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of a stack, with what stands between it and the name before."""

    text: str
    transposes: int
    wrapped: bool


@functools.lru_cache(maxsize=16384)
def scope_of(name_stack: Any) -> Scope:
    """Returns the scope that a JAX name stack says."""
    names, trailing = _names(name_stack)
    folded = _fold(names)
    return Scope(
        path=tuple(name.text for name in folded if not is_marker(name.text)),
        transposes=sum(name.transposes for name in folded) + trailing,
        markers=tuple(dict.fromkeys(name.text for name in folded if is_marker(name.text))),
        wrapped=bool(folded) and folded[0].wrapped,
    )


def scope_of_equation(eqn: Any) -> Scope:
    """Returns what an equation of a jaxpr says of its own scope."""
    return scope_of(eqn.source_info.name_stack)


def ambient_scope() -> Scope:
    """Returns the scope that is open at this point of the program."""
    stack = ambient_name_stack()
    return Scope() if stack is None else scope_of(stack)


def is_marker(component: str) -> bool:
    """Whether a component of a name stack is one of our own markers."""
    return component.startswith(MARKER_PREFIX)


def in_iteration(scope: Scope, loop: int, iteration: int) -> Scope:
    """Returns the scope of an equation in one iteration of a loop that is written out."""
    marker = f"{MARKER_PREFIX}iteration:{loop}:{iteration}"
    return replace(scope, markers=(*scope.markers, marker))


def iteration_of(scope: Scope) -> int | None:
    """Returns the iteration of the innermost loop around that is written out."""
    prefix = f"{MARKER_PREFIX}iteration:"
    found = (marker for marker in reversed(scope.markers) if marker.startswith(prefix))
    return next((int(marker.rsplit(":", 1)[1]) for marker in found), None)


def _names(name_stack: Any) -> tuple[list[_Name], int]:
    """Returns the names of a stack and the number of transposes behind the last one."""
    names: list[_Name] = []
    transposes, wrapped = 0, False
    for component in components(name_stack):
        if component.is_transform or component.name in _WRAPPER_SCOPES:
            transposes += component.name == "transpose" and component.is_transform
            wrapped = True
            continue
        # Users may open a scope of several names at once: `named_scope("model/layer0")`.
        for text in filter(None, component.name.split("/")):
            names.append(_Name(text, transposes, wrapped))
            transposes, wrapped = 0, False
    return names, transposes


def _fold(names: Sequence[_Name]) -> list[_Name]:
    """Drops each run of names behind a wrapper that repeats the end of the path before it.

    A repetition also repeats the transposes of its names. Of both the larger number counts.
    """
    folded: list[_Name] = []
    i = 0
    while i < len(names):
        before = tuple(name.text for name in folded)
        rest = tuple(name.text for name in names[i:])
        repeated = repetition(before, rest) if names[i].wrapped else 0
        for offset in range(repeated):
            at = len(folded) - repeated + offset
            first, second = folded[at], names[i + offset]
            most = max(first.transposes, second.transposes)
            folded[at] = _Name(first.text, most, first.wrapped)
        if not repeated:
            folded.append(names[i])
        i += max(repeated, 1)
    return folded
