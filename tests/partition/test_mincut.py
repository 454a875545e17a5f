"""Minimum cuts against all cuts of small random graphs."""

from itertools import product

import hypothesis.strategies as st
from hypothesis import given, settings

from multimesh._src.partition.assign.mincut import SINK, SOURCE, FlowGraph

NUM_NODES = 6
NODES = st.integers(0, NUM_NODES - 1)
EDGES = st.lists(st.tuples(NODES, NODES, st.one_of(st.none(), st.integers(0, 9))), max_size=20)


def cost(edges, side: frozenset[int]) -> float:
    """What the edges from `side` to the other nodes cost."""
    cut = [capacity for tail, head, capacity in edges if tail in side and head not in side]
    return float("inf") if None in cut else sum(cut)


@given(EDGES)
@settings(max_examples=300, deadline=None)
def test_no_cut_is_cheaper_and_none_as_cheap_is_smaller(edges):
    graph = FlowGraph()
    for _ in range(2, NUM_NODES):
        graph.add_node()
    for edge in edges:
        graph.add_edge(*edge)
    cuts = [
        frozenset({SOURCE, *(node for node, taken in enumerate(chosen, 2) if taken)})
        for chosen in product((False, True), repeat=NUM_NODES - 2)
    ]
    best = min(cost(edges, side) for side in cuts)
    if best == float("inf"):
        return
    found = graph.source_side()
    assert SINK not in found
    assert cost(edges, found) == best
    assert all(found <= side for side in cuts if cost(edges, side) == best)


def test_a_path_is_cut_at_its_narrowest_edge():
    graph = FlowGraph()
    a, b = graph.add_node(), graph.add_node()
    for edge in ((SOURCE, a, 5), (a, b, 2), (b, SINK, 3)):
        graph.add_edge(*edge)
    assert graph.source_side() == {SOURCE, a}
