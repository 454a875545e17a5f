"""The closed forms of the schedules hold beyond the golden file, with random costs."""

import pytest
from hypothesis import assume, given, settings, strategies as st

from multimesh._src.schedule.interleaved import round_size
from multimesh._src.schedule.make import make_schedule
from multimesh._src.schedule.rule import Shape
from multimesh._src.schedule.simulate import simulate

ranks = st.integers(1, 16)
microbatches = st.integers(1, 64)
chunks = st.integers(1, 4)
costs = st.fixed_dictionaries({kind: st.integers(1, 9) for kind in "FBW"})
few = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("gpipe", lambda p, m, r: m),
        ("1f1b", lambda p, m, r: min(p - r, m)),
        ("eager-1f1b", lambda p, m, r: min(2 * (p - r) - 1, m)),
    ],
)
@few
@given(p=ranks, m=microbatches, costs=costs)
def test_one_chunk(name, peak, p, m, costs):
    found = simulate(make_schedule(name, num_ranks=p, num_microbatches=m), costs=costs)
    assert found.makespan == (m + p - 1) * sum(costs.values())
    assert found.peaks.until_b == tuple(peak(p, m, r) for r in range(p))


@few
@given(p=ranks, rounds=st.integers(1, 8), extra=st.integers(0, 15), v=chunks, costs=costs)
def test_interleaved_1f1b(p, rounds, extra, v, costs):
    m = rounds * (p + extra % p)
    size = round_size(Shape(p, m))
    assume(m % size == 0)
    schedule = make_schedule("interleaved-1f1b", num_ranks=p, num_microbatches=m, num_chunks=v)
    found = simulate(schedule, costs=costs)
    assert found.makespan == (m * v + p - 1) * sum(costs.values())
    assert found.peaks.until_b == tuple(
        min(m * v, 2 * (p - 1 - r) + (v - 1) * size + 1) for r in range(p)
    )


@few
@given(p=ranks, more=st.integers(0, 48), v=chunks, costs=costs)
def test_looped_bfs(p, more, v, costs):
    m = p + more
    schedule = make_schedule("looped-bfs", num_ranks=p, num_microbatches=m, num_chunks=v)
    found = simulate(schedule, costs=costs)
    assert found.makespan == (m * v + p - 1) * sum(costs.values())
    assert found.peaks.until_b == (m * v,) * p


@few
@given(p=ranks, more=st.integers(0, 48), costs=costs)
def test_zb_h1(p, more, costs):
    m = p + more
    schedule = make_schedule("zb-h1", num_ranks=p, num_microbatches=m)
    assert simulate(schedule).makespan == 3 * m + p - 1
    found = simulate(schedule, costs=costs)
    assert found.span_bubble == (p - 1) * max(costs["F"] + costs["B"] - costs["W"], costs["B"])
    assert found.peaks.until_w == (p,) * p
    assert found.peaks.until_b == tuple(p - r for r in range(p))


@few
@given(p=ranks, more=st.integers(0, 33))
def test_zb_h2(p, more):
    m = 2 * p - 1 + more
    found = simulate(make_schedule("zero-bubble-h2", num_ranks=p, num_microbatches=m))
    assert found.makespan == 3 * m + p - 1
    assert found.peaks.until_w == (2 * p - 1,) * p
    assert found.peaks.until_b == tuple(2 * (p - r) - 1 for r in range(p))


@few
@given(p=ranks, more=st.integers(0, 33))
def test_zb_v(p, more):
    m = 2 * p - 1 + more
    found = simulate(make_schedule("zb-v", num_ranks=p, num_microbatches=m))
    assert found.makespan == 6 * m + p - 1
    assert found.peaks.until_w == (2 * p,) * p


@few
@given(p=ranks, m=microbatches)
def test_zb_v_takes_any_number_of_microbatches(p, m):
    found = simulate(make_schedule("zb-v", num_ranks=p, num_microbatches=m))
    assert max(found.peaks.until_w) <= 2 * p


@few
@given(p=ranks, more=st.integers(0, 32))
def test_dualpipe_v(p, more):
    m = 2 * p + more
    found = simulate(make_schedule("dualpipe-v", num_ranks=p, num_microbatches=m))
    assert found.makespan == 6 * m + 2 * (p - 1)
    assert found.peaks.until_w == (2 * p + 1,) * p


@few
@given(p=ranks, more=st.integers(0, 32), half=st.integers(0, 5))
def test_latency_costs_the_eager_order_once(p, more, half):
    # F = 5 and BW = 5, so latencies up to half of their sum are c <= 5.
    m = p + more
    schedule = make_schedule("eager-1f1b", num_ranks=p, num_microbatches=m)
    found = simulate(schedule, costs={"F": 5, "B": 3, "W": 2}, latency=half)
    assert found.makespan == (m + p - 1) * 10 + 2 * half * (p - 1)


@few
@given(p=ranks, m=microbatches, v=chunks, costs=costs)
def test_lower_bounds(p, m, v, costs):
    schedule = make_schedule("looped-bfs", num_ranks=p, num_microbatches=m, num_chunks=v)
    found = simulate(schedule, costs=costs)
    whole = sum(costs.values())
    assert found.makespan >= m * v * whole + (p - 1) * costs["F"]
    assert found.makespan >= p * v * whole
