"""`Rule`: a way to make a schedule for any number of ranks, microbatches and chunks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from multimesh._src.errors import ScheduleError, message
from multimesh._src.schedule.actions import Entry, Kind
from multimesh._src.schedule.graph import Part, StageGraph, fit
from multimesh._src.schedule.placement import (
    Placement,
    looped,
    num_chunks_of,
    placement_message,
    schedules_for,
    v_shaped,
)
from multimesh._src.schedule.schedule import Schedule, keep_stages

Chunks: TypeAlias = Literal["one", "any", "v"]
Parts: TypeAlias = Part | tuple[Part, ...] | None

_FOR_ANY_NUMBER: Mapping[Chunks, str] = {"one": "eager-1f1b", "any": "looped-bfs", "v": "zb-v"}
_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a schedule: ranks, microbatches, and stages (chunks) a rank."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What a program asks of a schedule.

    Attributes:
        num_ranks: Submeshes that hold stages.
        num_microbatches: Iterations of the loop.
        num_chunks: Stages a rank, 0 if the schedule may choose.
        placement: The rank of every stage, empty if the schedule may choose.
        forward_only: Whether the loop has no backward.
        names: For custom rows, what part of an action the task of each name belongs to (several
            if one task is both F and BW); None for tasks outside the ranks, which rows may name
            but do not order.
        graphs: The program's stage graph, if it is known already; at most one.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 0
    placement: Placement = ()
    forward_only: bool = False
    names: Mapping[str, Parts] = field(default_factory=dict[str, Parts])
    graphs: tuple[StageGraph, ...] = ()

    @property
    def shape(self) -> Shape:
        """The size, with one stage a rank unless said otherwise."""
        chunks = num_chunks_of(self.placement) if self.placement else self.num_chunks or 1
        return Shape(self.num_ranks, self.num_microbatches, chunks)

    def graph(self, kinds: Iterable[Kind]) -> StageGraph:
        """The program's stage graph, else the textbook chain of these kinds."""
        if self.graphs:
            return self.graphs[0]
        kinds = (Kind.F,) if self.forward_only else kinds
        placement = self.placement or looped(self.num_ranks, self.shape.num_chunks)
        return StageGraph.chain(self.num_ranks, placement=placement, kinds=kinds)


class AbstractRule(Protocol):
    """Anything that makes a schedule for a program."""

    def make(self, request: Request) -> Schedule:
        """Makes the schedule.

        Raises:
            ScheduleError: It cannot do what is asked.
        """
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Rule:
    """A built-in schedule for any size that it can do.

    Calling it with `num_ranks`, `num_microbatches` and `num_chunks` gives the `Schedule`.

    Attributes:
        name: Its name.
        chunks: `"one"` stage a rank, `"any"` number in the looped placement, or the two of the V
            placement, `"v"`.
        kinds: The kinds of action that it uses.
        row: The actions of one rank.
        needs: What the number of microbatches lacks, as a sentence; empty if it will do.
        aliases: Other names.
    """

    name: str
    chunks: Chunks
    kinds: tuple[Kind, ...]
    row: Callable[[Shape, int], Iterable[Entry]]
    needs: Callable[[Shape], str] = lambda shape: ""
    aliases: tuple[str, ...] = ()

    def __call__(
        self, *, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
    ) -> Schedule:
        """Makes the schedule.

        Args:
            num_ranks: Submeshes in schedule order.
            num_microbatches: Iterations of the loop.
            num_chunks: Stages a rank; by default one, or the two of the V placement.

        Raises:
            ScheduleError: The schedule cannot do this number of microbatches or chunks.
        """
        if num_chunks is None:
            num_chunks = 2 if self.chunks == "v" else 1
        shape = Shape(num_ranks, num_microbatches, num_chunks)
        why = self.objection(shape)
        if why:
            raise ScheduleError(why)
        rows = tuple(tuple(self.row(shape, rank)) for rank in range(num_ranks))
        return Schedule(self.name, rows, self.placement(shape), num_microbatches)

    def __repr__(self) -> str:
        return f"<schedule {self.name}>"

    def make(self, request: Request) -> Schedule:
        """Makes the schedule for a program, on the program's placement.

        Raises:
            ScheduleError: The schedule cannot do this size, or wants another placement.
        """
        shape = request.shape
        chunks = shape.num_chunks if request.placement or request.num_chunks else None
        if request.placement:
            check_placement(self.name, self.placement(shape), request)
        schedule = self(
            num_ranks=shape.num_ranks, num_microbatches=shape.num_microbatches, num_chunks=chunks
        )
        return adapt(schedule, request)

    def placement(self, shape: Shape) -> Placement:
        """The rank of every stage."""
        if self.chunks == "v":
            return v_shaped(shape.num_ranks)
        return looped(shape.num_ranks, 1 if self.chunks == "one" else shape.num_chunks)

    def objection(self, shape: Shape) -> str:
        """Why the schedule cannot do this size; empty if it can."""
        for what, count in (
            ("ranks", shape.num_ranks),
            ("microbatches", shape.num_microbatches),
            ("stages a rank", shape.num_chunks),
        ):
            if count < 1:
                return f"A schedule of `{count}` {what} does not exist: give `1` or more."
        if self.chunks == "one" and shape.num_chunks > 1:
            return message(
                f"Schedule `{self.name}` has one stage a rank, but there are "
                f"`{shape.num_chunks}` stages a rank.",
                ways=[
                    schedules_for(looped(shape.num_ranks, shape.num_chunks)),
                    "put one stage on each rank",
                ],
            )
        if self.chunks == "v" and shape.num_chunks != 2:
            return message(
                f"Schedule `{self.name}` has `2` stages a rank, in the V placement, not "
                f"`{shape.num_chunks}`.",
                ways=[
                    schedules_for(looped(shape.num_ranks, shape.num_chunks)),
                    'register the layers with `interleave=2, placement="v"`',
                ],
            )
        return self._microbatch_objection(shape)

    def _microbatch_objection(self, shape: Shape) -> str:
        needs = self.needs(shape)
        if not needs:
            return ""
        return message(
            f"Schedule `{self.name}` cannot do `{shape.num_microbatches}` microbatches on "
            f"`{shape.num_ranks}` ranks: {needs}",
            ways=[
                "change the number of microbatches",
                f'use `"{_FOR_ANY_NUMBER[self.chunks]}"`, which takes any number',
            ],
        )


def adapt(schedule: Schedule, request: Request) -> Schedule:
    """Drops what the program lacks: the last stages of an uneven placement, or all backwards.

    Raises:
        ScheduleError: The schedule wants another placement than the program has.
    """
    wanted = request.placement or schedule.placement
    check_placement(schedule.name, schedule.placement, request)
    schedule = keep_stages(schedule, len(wanted))
    if request.forward_only:
        graph = StageGraph.chain(schedule.num_ranks, placement=wanted, kinds=(Kind.F,))
        return fit(schedule, graph)
    return fit(schedule, request.graphs[0]) if request.graphs else schedule


def check_placement(name: str, wanted: Placement, request: Request) -> None:
    """Raises a ScheduleError if a program's stages do not begin as a schedule wants them."""
    actual = request.placement
    if wanted[: len(actual)] != actual:
        labels = request.graphs[0].labels if request.graphs else ()
        raise ScheduleError(placement_message(name, wanted, actual, labels, _tasks(request)))


def _tasks(request: Request) -> dict[int, str]:
    """The names of the tasks of every stage, a few of them where they are many."""
    found: dict[int, dict[str, None]] = {}
    for name, parts in request.names.items():
        for part in (parts,) if isinstance(parts, Part) else parts or ():
            # Names that forward and backward share come with the kind, as `layer0:F`.
            found.setdefault(part.stage, {})[name.removesuffix(f":{part.kind}")] = None
    return {stage: _few(list(names)) for stage, names in found.items()}


def _few(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"
