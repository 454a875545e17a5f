"""Which argument does each result succeed (R8)?

A training step takes a state and gives back the next one. If the new state lands where the old one
lay, the step can be called for ever without moving it. `successors` finds these pairs from the
trees of arguments and results alone:

    step(state: donated, batch) -> (new_state, loss)
         leaves 0..7,    8          leaves 0..7, 8
    successors: result leaf i succeeds argument leaf i for i in 0..7, the loss succeeds nothing.

The successor of an argument is the first subtree of the output, outer ones first, that has the
same treedef and the same shapes and dtypes. Arguments choose in falling order of leaves (donated
ones first among equals), and an output leaf succeeds at most one argument leaf. An argument that
is not donated has a successor only if it has two or more leaves: a lone array of the right shape
is too likely to be something else.

    init(params) -> (count, mu, nu)      mu succeeds params; nu, zeros too, is a *sibling*

Results that are made of no argument would lie anywhere; where a whole subtree of them is like an
argument, it goes where that one lies (`siblings`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

PyTreeDef = Any  # jax.tree_util.PyTreeDef
Kind = tuple[tuple[int, ...], Any]  # shape and dtype


@dataclass(frozen=True, slots=True)
class ArgumentTree:
    """One argument of the call as the caller wrote it: a tree over consecutive flat leaves."""

    tree: PyTreeDef
    first_leaf: int
    donated: bool


def successors(
    arguments: Sequence[ArgumentTree],
    argument_avals: Sequence[Any],
    out_tree: PyTreeDef,
    out_avals: Sequence[Any],
) -> tuple[int | None, ...]:
    """Returns for each flat result the flat argument that it succeeds, or None.

    Args:
        arguments: The arguments, in order.
        argument_avals: Shape and dtype of all flat arguments.
        out_tree: The tree of the results.
        out_avals: Shape and dtype of all flat results.
    """
    succeeded: list[int | None] = [None] * len(out_avals)
    for argument in sorted(arguments, key=lambda a: (-a.tree.num_leaves, not a.donated)):
        first, size = argument.first_leaf, argument.tree.num_leaves
        if size < (1 if argument.donated else 2):
            continue
        for start in _alike(argument, argument_avals, out_tree, out_avals):
            if all(leaf is None for leaf in succeeded[start : start + size]):
                succeeded[start : start + size] = range(first, first + size)
                break
    return tuple(succeeded)


def siblings(
    arguments: Sequence[ArgumentTree],
    argument_avals: Sequence[Any],
    out_tree: PyTreeDef,
    out_avals: Sequence[Any],
    free: Sequence[bool],
) -> tuple[int | None, ...]:
    """Returns for each flat result the flat argument beside which it belongs, or None.

    Args:
        arguments: The arguments, in order.
        argument_avals: Shape and dtype of all flat arguments.
        out_tree: The tree of the results.
        out_avals: Shape and dtype of all flat results.
        free: Per flat result, whether nothing else says where it goes.
    """
    beside: list[int | None] = [None] * len(out_avals)
    for argument in sorted(arguments, key=lambda a: -a.tree.num_leaves):
        first, size = argument.first_leaf, argument.tree.num_leaves
        if size < 2:
            continue
        for start in _alike(argument, argument_avals, out_tree, out_avals):
            places = range(start, start + size)
            if all(free[i] and beside[i] is None for i in places):
                beside[start : start + size] = range(first, first + size)
    return tuple(beside)


def _alike(
    argument: ArgumentTree,
    argument_avals: Sequence[Any],
    out_tree: PyTreeDef,
    out_avals: Sequence[Any],
) -> Iterator[int]:
    """Yields the first leaf of every subtree of the output that has the types of an argument."""
    first, size = argument.first_leaf, argument.tree.num_leaves
    wanted = _kinds(argument_avals[first : first + size])
    for tree, start in _subtrees(out_tree, 0):
        if tree == argument.tree and _kinds(out_avals[start : start + size]) == wanted:
            yield start


def _kinds(avals: Sequence[Any]) -> list[Kind]:
    return [(tuple(aval.shape), aval.dtype) for aval in avals]


def _subtrees(tree: PyTreeDef, start: int) -> Iterator[tuple[PyTreeDef, int]]:
    """Yields every subtree with leaves and its first leaf, outer ones first, left to right."""
    if tree.num_leaves == 0:
        return
    yield tree, start
    if jax.tree_util.treedef_is_leaf(tree):
        return
    for child in tree.children():
        yield from _subtrees(child, start)
        start += child.num_leaves
