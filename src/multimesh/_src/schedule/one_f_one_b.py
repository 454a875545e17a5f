"""1f1b and eager-1f1b: a few forwards, then one backward for each forward.

1f1b is the order of Narayanan et al. 2021 (arXiv:2104.04473, figure 3). The eager order warms up
with about twice as many forwards; this hides the latency of transfers in the steady state.
"""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape


def _textbook_row(shape: Shape, rank: int) -> Iterator[Action]:
    m = shape.num_microbatches
    warm = min(shape.num_ranks - 1 - rank, m)
    for i in range(warm):
        yield Action(Kind.F, rank, i)
    for i in range(m):
        if warm + i < m:
            yield Action(Kind.F, rank, warm + i)
        yield Action(Kind.BW, rank, i)


def _eager_row(shape: Shape, rank: int) -> Iterator[Action]:
    m = shape.num_microbatches
    warm = min(m, 2 * (shape.num_ranks - rank) - 1)
    for i in range(warm):
        yield Action(Kind.F, rank, i)
    for i in range(m):
        yield Action(Kind.BW, rank, i)
        if warm + i < m:
            yield Action(Kind.F, rank, warm + i)


one_f_one_b = Rule("1f1b", "one", (Kind.F, Kind.BW), _textbook_row)
eager_1f1b = Rule("eager-1f1b", "one", (Kind.F, Kind.BW), _eager_row)
