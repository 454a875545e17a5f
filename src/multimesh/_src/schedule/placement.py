"""Placements: which rank holds a stage.

A placement is a tuple with the rank of every stage. In the looped one, chunk c of rank r is stage
c * p + r; in the V placement rank r holds stages r and 2 * p - 1 - r.
"""

from typing import TypeAlias

from multimesh._src.errors import ScheduleError, message

Placement: TypeAlias = tuple[int, ...]


def looped(num_ranks: int, num_chunks: int = 1) -> Placement:
    """The looped placement of `num_ranks * num_chunks` stages."""
    return tuple(range(num_ranks)) * num_chunks


def v_shaped(num_ranks: int) -> Placement:
    """The V placement of `2 * num_ranks` stages."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def placement_named(name: str, num_ranks: int, num_chunks: int) -> Placement:
    """The placement `"loop"` or `"v"` (in either case).

    Raises:
        ScheduleError: There is no such placement, or V with another number of chunks than two.
    """
    if name.lower() == "loop":
        return looped(num_ranks, num_chunks)
    if name.lower() == "v":
        if num_chunks != 2:
            raise ScheduleError(f"The V placement has `2` stages a rank, not `{num_chunks}`.")
        return v_shaped(num_ranks)
    ways = ['say `placement="loop"`, `placement="v"` or give the rank of every stage']
    raise ScheduleError(message(f"There is no placement `{name}`.", ways=ways))


def num_chunks_of(placement: Placement) -> int:
    """The largest number of stages on one rank."""
    return max((placement.count(rank) for rank in set(placement)), default=1)


def placement_message(name: str, wanted: tuple[int, ...], actual: tuple[int, ...]) -> str:
    """The error of a schedule on another placement, with both printed."""
    return message(
        f"Schedule `{name}` wants its stages on other ranks than the program has them.\n"
        f"  the schedule: stages 0, 1, ... on ranks `{list(wanted)}`\n"
        f"  the program:  stages 0, 1, ... on ranks `{list(actual)}`",
        ways=[
            'register the layers with the placement that the schedule wants (`placement="loop"` '
            'or `"v"`, `interleave=`)',
            "use a schedule for the placement that the program has",
        ],
    )
