"""`Schedule`: per rank an ordered row of actions, and where its stages lie."""

from dataclasses import dataclass

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import (
    Action,
    Entry,
    Kind,
    Pair,
    Row,
    actions_of,
    parse_rows,
    print_rows,
)
from multimesh._src.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank runs, in order.

    Attributes:
        name: The name of the schedule, `custom` for rows given by hand.
        rows: Per rank its actions and overlapped pairs in the order in which they run.
        placement: The rank of every stage.
        num_microbatches: How many microbatches the rows run.
    """

    name: str
    rows: tuple[Row, ...]
    placement: Placement
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of action in the rows. `W` in it asks for a split backward."""
        return frozenset(a.kind for row in self.rows for entry in row for a in actions_of(entry))

    def as_text(self) -> str:
        """The rows, one line a rank; `parse_schedule` reads them back."""
        return print_rows(self.rows)

    def __str__(self) -> str:
        return self.as_text()


def parse_schedule(text: str, *, name: str = "custom", source: str = "") -> Schedule:
    r"""Reads a schedule: one line a rank, the placement is where the actions stand.

    Raises:
        ScheduleError: A word is no action, a stage stands in two rows or in none.

    >>> parse_schedule("0F0 0BW0\n1F0 1BW0").placement
    (0, 1)
    """
    return schedule_of_rows(parse_rows(text, source=source), name=name, source=source)


def schedule_of_rows(rows: tuple[Row, ...], *, name: str = "custom", source: str = "") -> Schedule:
    """Makes a schedule of rows, with the placement and number of microbatches that they show.

    Raises:
        ScheduleError: The rows are empty, or a stage stands in two rows or in none.
    """
    ranks: dict[int, set[int]] = {}
    num_microbatches = 0
    for rank, row in enumerate(rows):
        for action in (a for entry in row for a in actions_of(entry)):
            ranks.setdefault(action.stage, set()).add(rank)
            num_microbatches = max(num_microbatches, action.microbatch + 1)
    if not ranks:
        raise ScheduleError(message("The schedule has no actions.", where=source))
    problems = _placement_problems(ranks)
    if problems:
        raise ScheduleError(message(listed(problems), where=source))
    placement = tuple(min(ranks[stage]) for stage in range(len(ranks)))
    return Schedule(name, rows, placement, num_microbatches)


def _placement_problems(ranks: dict[int, set[int]]) -> list[str]:
    missing = sorted(set(range(max(ranks) + 1)) - set(ranks))
    double = sorted(stage for stage, rows in ranks.items() if len(rows) > 1)
    return [f"Stage `{stage}` stands in no row." for stage in missing] + [
        f"Stage `{stage}` stands in the rows of ranks `{sorted(ranks[stage])}`; "
        "a stage lies on one rank."
        for stage in double
    ]


def keep_stages(schedule: Schedule, num_stages: int) -> Schedule:
    """The schedule without the actions of stages from `num_stages` on."""
    if num_stages >= schedule.num_stages:
        return schedule
    rows = tuple(
        tuple(e for e in (_kept(e, num_stages) for e in row) if e) for row in schedule.rows
    )
    return Schedule(schedule.name, rows, schedule.placement[:num_stages], schedule.num_microbatches)


def _kept(entry: Entry, num_stages: int) -> Entry | None:
    kept = [a for a in actions_of(entry) if a.stage < num_stages]
    return joined(kept)


def joined(actions: list[Action]) -> Entry | None:
    """The entry made of no, one or two actions."""
    match actions:
        case [first, second]:
            return Pair(first, second)
        case [only]:
            return only
        case _:
            return None
