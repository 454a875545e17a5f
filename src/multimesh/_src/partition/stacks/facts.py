"""What there is to say of a stack: who keeps which rows, and which of them move in every call.

state['w']: rows 0-3 on stage=0, rows 4-7 on stage=1
rows 2-3 are read on stage=1, rows 4-5 on stage=0       # interleaved layers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from multimesh._src.partition.seeds import Seeds
from multimesh._src.partition.stacks.blocks import Blocks
from multimesh._src.partition.stacks.find import Read


@dataclass(frozen=True, slots=True)
class StackFacts:
    """One argument whose rows are used by several submeshes.

    Attributes:
        name: The user's name of it.
        num_rows: The size of its first dim.
        homes: First row, row behind the last, and submesh of each block.
        moved: Rows that another submesh reads than the one that keeps them: home, reader, rows.
        moved_bytes: Bytes of these rows. They move once a call, and so does what is added to them.
        why: Why one submesh keeps all rows; empty where several share them.
    """

    name: str
    num_rows: int
    homes: tuple[tuple[int, int, str], ...]
    moved: tuple[tuple[str, str, tuple[int, ...]], ...]
    moved_bytes: int
    why: str


def facts_of(
    name: str,
    row_bytes: int,
    reads: Sequence[Read],
    blocks: Blocks,
    seeds: Seeds,
) -> StackFacts:
    """Returns what there is to say of an argument.

    Args:
        name: The user's name of it.
        row_bytes: Bytes of a row.
        reads: Where rows are read.
        blocks: Who keeps which rows.
        seeds: Knows the submeshes.
    """
    labels = [submesh.label for submesh in seeds.submeshes]
    ends = list(pairwise(blocks.bounds))
    moved: dict[tuple[str, str], set[int]] = {}
    for read in reads:
        for row in read.rows:
            number = next(i for i, (start, stop) in enumerate(ends) if start <= row < stop)
            home = blocks.submeshes[number]
            for user in read.users:
                if user != home:
                    moved.setdefault((labels[home], labels[user]), set()).add(row)
    return StackFacts(
        name=name,
        num_rows=blocks.bounds[-1],
        homes=tuple(
            (start, stop, labels[home])
            for (start, stop), home in zip(ends, blocks.submeshes, strict=True)
        ),
        moved=tuple((*edge, tuple(sorted(rows))) for edge, rows in moved.items()),
        moved_bytes=row_bytes * sum(map(len, moved.values())),
        why=blocks.why,
    )
