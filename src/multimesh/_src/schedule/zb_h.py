"""zb-h1 and zb-h2: weight gradients fill the bubble (Qi et al. 2023, arXiv:2401.10241)."""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape

_KINDS = (Kind.F, Kind.B, Kind.W)


def _h1_needs(shape: Shape) -> str:
    least = shape.num_ranks
    return "" if shape.num_microbatches >= least else f"it needs `{least}` or more (the ranks)."


def _h1_row(shape: Shape, rank: int) -> Iterator[Action]:
    m = shape.num_microbatches
    warm = shape.num_ranks - 1 - rank
    for i in range(warm):
        yield Action(Kind.F, rank, i)
    for i in range(m):
        if warm + i < m:
            yield Action(Kind.F, rank, warm + i)
        yield Action(Kind.B, rank, i)
        if i >= rank:
            yield Action(Kind.W, rank, i - rank)
    for i in range(m - rank, m):
        yield Action(Kind.W, rank, i)


def _h2_needs(shape: Shape) -> str:
    least = 2 * shape.num_ranks - 1
    if shape.num_microbatches >= least:
        return ""
    return f"it needs `{least}` or more (twice the ranks, less one)."


def _h2_row(shape: Shape, rank: int) -> Iterator[Action]:
    m = shape.num_microbatches
    warm = 2 * (shape.num_ranks - rank) - 1
    for i in range(warm):
        yield Action(Kind.F, rank, i)
    for i in range(m):
        yield Action(Kind.B, rank, i)
        if i >= 2 * rank:
            yield Action(Kind.W, rank, i - 2 * rank)
        if warm + i < m:
            yield Action(Kind.F, rank, warm + i)
    for i in range(m - 2 * rank, m):
        yield Action(Kind.W, rank, i)


zb_h1 = Rule("zb-h1", "one", _KINDS, _h1_row, _h1_needs)
zb_h2 = Rule("zb-h2", "one", _KINDS, _h2_row, _h2_needs, aliases=("zero-bubble-h2",))
