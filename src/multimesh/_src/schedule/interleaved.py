"""interleaved-1f1b: 1f1b over several chunks a rank (Narayanan et al. 2021, arXiv:2104.04473).

Microbatches go in rounds of R: each chunk runs R microbatches before the next chunk has its turn.
R is the number of ranks where that divides the number of microbatches, else somewhat more.
"""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape


def round_size(shape: Shape) -> int:
    """R, the number of microbatches that a chunk runs in a row."""
    p, m = shape.num_ranks, shape.num_microbatches
    return p if m % p == 0 else m // max(1, m // p)


def _needs(shape: Shape) -> str:
    m, size = shape.num_microbatches, round_size(shape)
    if m % size == 0:
        return ""
    fits = [k for k in range(1, 2 * m + shape.num_ranks) if _divides(shape, k)]
    below = max(k for k in fits if k < m)
    above = min(k for k in fits if k > m)
    return (
        f"microbatches go in rounds of `{size}`, which does not divide `{m}`; "
        f"the nearest numbers that it can do are `{below}` and `{above}`."
    )


def _divides(shape: Shape, num_microbatches: int) -> bool:
    return num_microbatches % round_size(Shape(shape.num_ranks, num_microbatches)) == 0


def _row(shape: Shape, rank: int) -> Iterator[Action]:
    p, v = shape.num_ranks, shape.num_chunks
    size = round_size(shape)
    total = shape.num_microbatches * v
    warm = min(total, 2 * (p - 1 - rank) + (v - 1) * size)

    def slot(k: int, kind: Kind) -> Action:
        chunk = k % (size * v) // size
        if kind is Kind.BW:
            chunk = v - 1 - chunk
        return Action(kind, chunk * p + rank, k // (size * v) * size + k % size)

    for k in range(warm):
        yield slot(k, Kind.F)
    for k in range(total):
        if warm + k < total:
            yield slot(warm + k, Kind.F)
        yield slot(k, Kind.BW)


interleaved_1f1b = Rule("interleaved-1f1b", "any", (Kind.F, Kind.BW), _row, _needs)
