"""Placements: which rank holds a stage.

A placement is a tuple with the rank of every stage. In the looped one, chunk c of rank r is stage
c * p + r; in the V placement rank r holds stages r and 2 * p - 1 - r.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, listed, message

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


def schedules_for(placement: Placement) -> str:
    """The schedules that do a placement with any number of microbatches, as a way out."""
    num_ranks, num_chunks = len(set(placement)), num_chunks_of(placement)
    if placement == looped(num_ranks, num_chunks)[: len(placement)]:
        if num_chunks == 1:
            return 'use `"eager-1f1b"`, `"1f1b"` or `"gpipe"`, which have one stage a rank'
        return (
            'use `"looped-bfs"`, or `"interleaved-1f1b"` where the ranks divide the number of '
            "microbatches"
        )
    if placement == v_shaped(num_ranks)[: len(placement)]:
        return 'use `"zb-v"`, which has the V placement'
    return "name no schedule: the default is then list scheduling, which takes any placement"


def placement_message(
    name: str,
    wanted: Placement,
    actual: Placement,
    labels: Sequence[str] = (),
    tasks: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """The error of a schedule on another placement, with both printed.

    Args:
        name: The name of the schedule.
        wanted: The rank of every stage in the schedule.
        actual: The rank of every stage in the program.
        labels: How to call the ranks; `rank 0`, ... by default.
        tasks: The tasks of the stages, as far as known.
    """

    def of(rank: int) -> str:
        return labels[rank] if rank < len(labels) else f"rank {rank}"

    def named(stage: int) -> str:
        return f"stage {stage} ({tasks[stage]})" if stage in tasks else f"stage {stage}"

    problems: list[str] = []
    for stage, rank in enumerate(actual):
        if stage >= len(wanted):
            earlier = [named(s) for s in range(stage) if actual[s] == rank]
            beside = f" beside {' and '.join(earlier)}" if earlier else ""
            end = f"the schedule ends with stage {len(wanted) - 1}"
            problems.append(f"{named(stage)} lies on {of(rank)}{beside}; {end}")
        elif wanted[stage] != rank:
            problems.append(
                f"{named(stage)} lies on {of(rank)}; the schedule wants it on {of(wanted[stage])}"
            )
    return message(
        f"Schedule `{name}` wants its stages on other ranks than the program has them.",
        window=f"the schedule: stages 0, 1, ... on ranks `{list(wanted)}`\n"
        f"the program:  stages 0, 1, ... on ranks `{list(actual)}`\n{listed(problems)}",
        ways=[
            schedules_for(actual),
            _other_place(wanted, actual, named(len(wanted) - 1), of(wanted[-1])),
        ],
    )


def _other_place(wanted: Placement, actual: Placement, last: str, rank: str) -> str:
    """What to change in the program so that its stages lie as wanted."""
    if actual[:-1] == wanted:
        return f"put the tasks of stage {len(wanted)} on {rank}, so that they join {last}"
    num_ranks, num_chunks = len(set(wanted)), num_chunks_of(wanted)
    how = ""
    if wanted == looped(num_ranks, num_chunks):
        how = f" (`register_layers` does so for layers with `interleave={num_chunks}`)"
    elif wanted == v_shaped(num_ranks):
        how = ' (`register_layers` does so for layers with `interleave=2, placement="v"`)'
    return f"put the stages on the ranks that the schedule wants{how}"
