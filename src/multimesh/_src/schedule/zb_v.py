"""zb-v: two chunks a rank in a V, no bubble at unit cost (Qi et al. 2024, arXiv:2405.15362)."""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape

_F, _B, _W = Kind.F, Kind.B, Kind.W


def _phases(p: int, rank: int, num_steps: int) -> Iterator[tuple[Kind, int]]:
    """(kind, chunk) of every step, for `num_steps` microbatches (at least 2 * p - 1)."""
    for _ in range(2 * (p - rank) - 1):
        yield _F, 0
    for _ in range(rank):
        yield from ((_F, 1), (_F, 0))
    for _ in range(p - rank):
        yield from ((_F, 1), (_B, 1), (_W, 1))
    # So far chunk 0 has run 2p - 1 - rank forwards, chunk 1 has run p.
    forwards = 2 * p - 1 - rank
    for _ in range(num_steps - p):
        if forwards < num_steps:
            yield _F, 0
            forwards += 1
        yield from ((_B, 0), (_W, 0), (_F, 1), (_B, 1), (_W, 1))
    for _ in range(rank):
        yield from ((_B, 0), (_B, 1))
    for _ in range(p - rank):
        yield from ((_B, 0), (_W, 0))


def _row(shape: Shape, rank: int) -> Iterator[Action]:
    p, m = shape.num_ranks, shape.num_microbatches
    num_steps = max(2 * p - 1, m)
    stages = (rank, 2 * p - 1 - rank)
    done = {(kind, chunk): 0 for kind in (_F, _B, _W) for chunk in (0, 1)}
    for kind, chunk in _phases(p, rank, num_steps):
        i = done[kind, chunk]
        done[kind, chunk] = i + 1
        if i < m:
            yield Action(kind, stages[chunk], i)
    for chunk in (1, 0):
        for i in range(done[_W, chunk], m):
            yield Action(_W, stages[chunk], i)


zb_v = Rule("zb-v", "v", (_F, _B, _W), _row)
