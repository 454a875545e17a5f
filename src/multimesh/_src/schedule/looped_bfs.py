"""looped-bfs: all microbatches of a chunk before the next chunk (Lamy-Poirier 2022).

"Breadth-first pipeline parallelism", arXiv:2211.05953. Backward microbatches descend, so that the
last chunk's newest residuals go first.
"""

from collections.abc import Iterator

from multimesh._src.schedule.actions import Action, Kind
from multimesh._src.schedule.rule import Rule, Shape


def _row(shape: Shape, rank: int) -> Iterator[Action]:
    stages = [chunk * shape.num_ranks + rank for chunk in range(shape.num_chunks)]
    for stage in stages:
        for i in range(shape.num_microbatches):
            yield Action(Kind.F, stage, i)
    for stage in reversed(stages):
        for i in reversed(range(shape.num_microbatches)):
            yield Action(Kind.BW, stage, i)


looped_bfs = Rule("looped-bfs", "any", (Kind.F, Kind.BW), _row)
