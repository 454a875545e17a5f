"""R8: the successor relation, from trees and avals alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multimesh._src.frontend.succession import ArgumentTree, siblings, successors


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def relation(args: tuple[Any, ...], donated: tuple[int, ...], out: Any) -> tuple[int | None, ...]:
    arguments, avals, first = [], [], 0
    for i, arg in enumerate(args):
        leaves, tree = jax.tree.flatten(arg)
        arguments.append(ArgumentTree(tree, first, i in donated))
        avals += leaves
        first += len(leaves)
    out_leaves, out_tree = jax.tree.flatten(out)
    return successors(arguments, avals, out_tree, out_leaves)


PARAMS = {"b": f32(4), "w": f32(4, 4)}
OPT = {"b": f32(4), "w": f32(4, 4)}


def test_state_and_loss() -> None:
    assert relation((PARAMS, f32(8, 4)), (0,), (f32(), PARAMS)) == (None, 0, 1)


def test_undonated_tree_has_a_successor_and_undonated_array_has_none() -> None:
    # value_and_grad(params, x) -> (loss, grads), and x -> x
    assert relation((PARAMS, f32(8, 4)), (), (f32(8, 4), PARAMS)) == (None, 0, 1)


def test_donated_array_has_a_successor() -> None:
    assert relation((f32(4), f32(2)), (1,), (f32(4), f32(2))) == (None, 1)


def test_first_in_order_wins_and_a_leaf_succeeds_one() -> None:
    # equal trees: the first argument takes the first output, the second the second
    assert relation((PARAMS, OPT), (0, 1), (PARAMS, OPT, PARAMS)) == (0, 1, 2, 3, None, None)


def test_larger_arguments_choose_first() -> None:
    state = {"opt": OPT, "params": PARAMS}
    # `PARAMS` alone would take the first subtree that fits: the one inside the state
    assert relation((PARAMS, state), (0, 1), (state, PARAMS)) == (2, 3, 4, 5, 0, 1)


def test_donated_chooses_first_among_equals() -> None:
    assert relation((PARAMS, OPT), (1,), (PARAMS,)) == (2, 3)


def test_outer_subtree_before_inner() -> None:
    nested = ((f32(2), f32(2)), (f32(2), f32(2)))
    pair = (f32(2), f32(2))
    assert relation((nested, pair), (), (nested, pair)) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("other", [f32(4, 5), jax.ShapeDtypeStruct((4, 4), jnp.int32)])
def test_shape_and_dtype_must_agree(other: jax.ShapeDtypeStruct) -> None:
    assert relation((PARAMS,), (0,), {"b": f32(4), "w": other}) == (None, None)


def test_treedef_must_agree() -> None:
    assert relation(({"a": f32(2), "b": f32(2)},), (0,), [f32(2), f32(2)]) == (None, None)


def test_empty_trees_and_none() -> None:
    assert relation(
        (None, (), {"a": None, "w": f32(2)}), (0, 1, 2), (None, {"a": None, "w": f32(2)})
    ) == (0,)
    assert relation((f32(2),), (0,), ()) == ()


def test_input_is_untouched_and_result_repeats() -> None:
    args = ((PARAMS, OPT), (0, 1), (OPT, PARAMS))
    assert relation(*args) == relation(*args)


def test_siblings_are_whole_free_subtrees_like_an_argument() -> None:
    params = {"b": 0, "w": 0}
    tree = jax.tree.structure(params)
    out_tree = jax.tree.structure({"count": 0, "mu": params, "nu": params, "other": [0, 0]})
    avals = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3,), (3, 3))]
    out = [jax.ShapeDtypeStruct((), np.int32), *avals, *avals, *avals]
    argument = ArgumentTree(tree, 0, False)
    free = [True, False, True, True, True, True, True]
    assert siblings([argument], avals, out_tree, out, free) == (
        *(None, None, None),
        *(0, 1),
        *(None, None),
    )
