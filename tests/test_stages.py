import itertools

import pytest
from hypothesis import assume, given, strategies as st

from multimesh._src.errors import MatchError
from multimesh._src.stages import plan_layers


def table(stages) -> list[tuple[int, int]]:
    return [
        (stages.stage_of(layer), stages.rank_of(stages.stage_of(layer)))
        for layer in range(stages.num_layers)
    ]


def test_one_stage_a_rank():
    assert table(plan_layers(4, 2)) == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_uneven_layers_go_to_earlier_stages():
    assert plan_layers(10, 4).layers_per_stage == (3, 3, 2, 2)


def test_given_counts():
    stages = plan_layers(6, 3, layers_per_stage=[1, 2, 3])
    assert table(stages) == [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert [list(stages.layers_of(s)) for s in range(3)] == [[0], [1, 2], [3, 4, 5]]


def test_a_stage_may_be_given_no_layers():
    assert table(plan_layers(2, 3, layers_per_stage=(0, 1, 1))) == [(1, 1), (2, 2)]


def test_loop_placement_interleaved():
    assert table(plan_layers(8, 2, interleave=4)) == [
        (0, 0), (1, 1), (2, 0), (3, 1), (4, 0), (5, 1), (6, 0), (7, 1),
    ]  # fmt: skip


def test_v_placement():
    stages = plan_layers(8, 4, interleave=2, placement="v")
    assert [stages.rank_of(s) for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_balance():
    assert plan_layers(5, 2, balance=[1, 1, 1, 1, 4]).layers_per_stage == (4, 1)
    assert plan_layers(4, 2, balance=[0, 0, 0, 0]).layers_per_stage == (3, 1)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_balance_is_optimal(costs, num_stages):
    assume(num_stages <= len(costs))

    def worst(ends: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs))))

    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    counts = plan_layers(len(costs), num_stages, balance=costs).layers_per_stage
    assert all(count >= 1 for count in counts)
    assert worst(tuple(itertools.accumulate(counts))[:-1]) == min(map(worst, cuts))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_stages_are_contiguous_and_complete(num_layers, num_ranks, interleave):
    assume(num_layers >= num_ranks * interleave)
    stages = plan_layers(num_layers, num_ranks, interleave=interleave)
    found = [stages.stage_of(layer) for layer in range(num_layers)]
    assert found == sorted(found)
    assert set(found) == set(range(num_ranks * interleave))
    assert max(stages.layers_per_stage) - min(stages.layers_per_stage) <= 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layers_per_stage": (1, 2)}, "places `3` layers, but `num_layers=4`: 1 layers are left"),
        ({"layers_per_stage": (3, 2)}, "1 places have no layer"),
        ({"layers_per_stage": (1, 2, 1)}, "has `3` entries for `2` stages"),
        ({"layers_per_stage": (5, -1)}, "has a negative entry"),
        (
            {"layers_per_stage": (2, 2), "balance": (1,) * 4},
            "Both `layers_per_stage` and",
        ),
        ({"balance": (1, 2)}, "has `2` costs for `num_layers=4` layers"),
        ({"balance": (1, 2, -1, 1)}, "has the cost `-1.0`"),
        ({"interleave": 3}, "`4` layers cannot fill `6` stages"),
        ({"interleave": 0}, "`interleave=0`"),
        ({"placement": "zigzag"}, "No placement `zigzag`"),
        ({"placement": "v"}, "`placement='v'` has two stages a submesh, but `interleave=1`"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(MatchError) as caught:
        plan_layers(4, 2, **arguments)
    assert text in str(caught.value)


def test_layer_out_of_range():
    with pytest.raises(MatchError, match=r"Layer `4` is not among the `4` registered layers"):
        plan_layers(4, 2).stage_of(4)
    with pytest.raises(MatchError, match=r"counted from `0` to `3`\.\n  at here\n"):
        plan_layers(4, 2).stage_of(4, "here")
