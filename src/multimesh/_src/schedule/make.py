"""`make_schedule`: from what a user says to a schedule for their program."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, message
from multimesh._src.schedule.actions import is_entry
from multimesh._src.schedule.auto import Auto
from multimesh._src.schedule.built_in import BY_NAME, default_rule
from multimesh._src.schedule.custom import RowLike, custom
from multimesh._src.schedule.graph import StageGraph
from multimesh._src.schedule.placement import Placement, placement_named
from multimesh._src.schedule.rule import AbstractRule, Parts, Request, adapt
from multimesh._src.schedule.schedule import Schedule

ScheduleLike: TypeAlias = str | Schedule | AbstractRule | Sequence[RowLike] | None


def schedule_names() -> tuple[str, ...]:
    """Every name that `make_schedule` takes."""
    return (*BY_NAME, "auto")


def check_name(spec: object) -> None:
    """Raises a ScheduleError if `spec` is no schedule or a name that no schedule has.

    Rows are not looked into.
    """
    if not (spec is None or isinstance(spec, Schedule | Sequence) or hasattr(spec, "make")):
        raise _unknown(f"`{spec!r}` of type `{type(spec).__name__}` is no schedule.")
    named = isinstance(spec, str) and "\n" not in spec and not any(map(is_entry, spec.split()))
    if named and spec not in schedule_names():
        raise _unknown(f"There is no schedule `{spec}`.")


def make_schedule(
    spec: ScheduleLike = None,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 0,
    placement: str | Placement = (),
    forward_only: bool = False,
    names: Mapping[str, Parts] | None = None,
    graph: StageGraph | None = None,
) -> Schedule:
    """Makes the schedule that a user asks for.

    Args:
        spec: A name, a `Schedule`, a rule (an object of `multimesh.jax.schedules`), rows or text
            of rows (see `custom`), or None for the default: with one stage a rank eager-1f1b, or
            gpipe if there is no backward; with more interleaved-1f1b where the number of
            microbatches allows, else looped-bfs; zb-v in the V placement; list scheduling on any
            other placement.
        num_ranks: Submeshes that hold stages.
        num_microbatches: Iterations of the loop.
        num_chunks: Stages a rank; 0 if the schedule or `placement` decides.
        placement: The rank of every stage, `"loop"`, `"v"`, or empty if the schedule decides. It
            may end early, where the last stages of a schedule do not exist.
        forward_only: Whether the loop has no backward.
        names: For rows by task names, what part each task belongs to (several if one task is
            both F and BW; None if it is outside the ranks: rows may name it, but do not order it).
        graph: The program's stage graph, if known: actions that it lacks are dropped.

    Raises:
        ScheduleError: No such schedule, or it cannot do what is asked.

    >>> print(make_schedule("zb-h1", num_ranks=2, num_microbatches=2))
    0F0 0F1 0B0 0W0 0B1 0W1
    1F0 1B0 1F1 1B1 1W0 1W1
    """
    if isinstance(placement, str):
        chunks = num_chunks or (2 if placement.lower() == "v" else 1)
        placement = placement_named(placement, num_ranks, chunks)
    if graph is not None and not placement:
        placement = graph.placement
    request = Request(
        num_ranks,
        num_microbatches,
        num_chunks,
        tuple(placement),
        forward_only,
        names or {},
        () if graph is None else (graph,),
    )
    if isinstance(spec, Schedule):
        return _adapted(spec, request)
    return rule_of(spec, request).make(request)


def rule_of(spec: str | AbstractRule | Sequence[RowLike] | None, request: Request) -> AbstractRule:
    """The rule that makes the schedule of a spec.

    Raises:
        ScheduleError: There is no schedule of this name, or the spec is none.
    """
    if spec is None:
        return default_rule(request)
    if spec == "auto":
        return Auto()
    check_name(spec)
    if isinstance(spec, str):
        return BY_NAME[spec] if spec in BY_NAME else custom(spec)
    if isinstance(spec, Sequence):
        return custom(spec)
    return spec


def _unknown(what: str) -> ScheduleError:
    known = ", ".join(f"`{name}`" for name in schedule_names())
    ways = [
        f"use one of {known}",
        "use an object of `multimesh.jax.schedules`, or rows of actions",
    ]
    return ScheduleError(message(what, ways=ways))


def _adapted(schedule: Schedule, request: Request) -> Schedule:
    """A ready schedule for a program, if it is of the program's size."""
    for what, has, wants in (
        ("ranks", schedule.num_ranks, request.num_ranks),
        ("microbatches", schedule.num_microbatches, request.num_microbatches),
    ):
        if has != wants:
            raise ScheduleError(
                message(
                    f"Schedule `{schedule.name}` has `{has}` {what}, but the program has "
                    f"`{wants}`.",
                    ways=["give the schedule by name or as a rule, which makes it for any size"],
                )
            )
    return adapt(schedule, request)
