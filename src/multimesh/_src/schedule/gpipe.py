"""gpipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape


def _row(shape: Shape, rank: int) -> Iterator[Action]:
    for kind in (Kind.F, Kind.BW):
        for i in range(shape.num_microbatches):
            yield Action(kind, rank, i)


gpipe = Rule("gpipe", "one", (Kind.F, Kind.BW), _row, aliases=("fill-drain", "breadth-first"))
