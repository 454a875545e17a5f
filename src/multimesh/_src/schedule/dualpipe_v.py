"""dualpipe-v: forwards and backwards of two chunks run as overlapped pairs, in a V.

The "cut-in-half" form of DualPipe (DeepSeek-AI 2024, arXiv:2412.19437).
"""

from collections import deque
from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Entry, Kind, Pair
from multimesh._src.schedule.rule import Rule, Shape


def _needs(shape: Shape) -> str:
    least = 2 * shape.num_ranks
    return (
        "" if shape.num_microbatches >= least else f"it needs `{least}` or more (twice the ranks)."
    )


class _Counters:
    """The next microbatch of every chunk's forwards and backwards, and the deferred W."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.stages = (rank, 2 * shape.num_ranks - 1 - rank)
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.deferred: deque[Action] = deque()

    def forward(self, chunk: int) -> Action:
        i = self.forwards[chunk]
        self.forwards[chunk] += 1
        return Action(Kind.F, self.stages[chunk], i)

    def backward(self, chunk: int, *, defer: bool = False) -> Action:
        i = self.backwards[chunk]
        self.backwards[chunk] += 1
        if defer:
            self.deferred.append(Action(Kind.W, self.stages[chunk], i))
        return Action(Kind.B if defer else Kind.BW, self.stages[chunk], i)

    def pair(self, forward: int, backward: int) -> Pair:
        return Pair(self.forward(forward), self.backward(backward))

    def weight(self) -> Action:
        return self.deferred.popleft()


def _row(shape: Shape, rank: int) -> Iterator[Entry]:
    p, m = shape.num_ranks, shape.num_microbatches
    after = p - 1 - rank  # ranks after this one
    at = _Counters(shape, rank)
    for _ in range(2 * after):
        yield at.forward(0)
    for _ in range(rank + 1):
        yield from (at.forward(0), at.forward(1))
    for _ in range(after):
        yield from (at.backward(1, defer=True), at.weight(), at.forward(1))
    for step in range(m - 2 * p + rank + 1):
        if step == 0 and after == 0:
            yield from (at.forward(0), at.backward(1))
        else:
            yield at.pair(0, 1)
        yield at.pair(1, 0)
    for _ in range(after):
        yield from (at.backward(1), at.pair(1, 0))
    yield from _drain(at, rank, after)


def _drain(at: _Counters, rank: int, after: int) -> Iterator[Action]:
    """The last backwards, whose W are deferred from half of the first loop on."""
    half = (rank + 1) // 2
    for step in range(rank + 1):
        late = step > half or (step == half and rank % 2 == 1)
        yield at.backward(1, defer=late)
        yield at.backward(0, defer=step >= half)
    for _ in range(after):
        yield from (at.weight(), at.backward(0, defer=True))
    for _ in range(rank + 1):
        yield at.weight()


dualpipe_v = Rule("dualpipe-v", "v", (Kind.F, Kind.B, Kind.W, Kind.BW), _row, _needs)
