"""custom: rows given by hand, as text, as actions, or by the names of tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, listed, message
from multimesh._src.schedule.actions import (
    Action,
    Entry,
    Pair,
    Row,
    is_entry,
    parse_entry,
    parse_rows,
)
from multimesh._src.schedule.graph import Part
from multimesh._src.schedule.rule import Parts, Request
from multimesh._src.schedule.schedule import Schedule, schedule_of_rows

# What a row may hold: actions, their text, names of tasks, and (microbatch, name of a task).
RowItem: TypeAlias = Action | Pair | str | tuple[int, str]
RowLike: TypeAlias = str | Sequence[RowItem]


@dataclass(frozen=True, slots=True)
class CustomRows:
    """Rows given by hand, one a rank, whose names are resolved when the program is known.

    Attributes:
        rows: Per rank its items.
        source: Where they come from, for errors.
    """

    rows: tuple[tuple[RowItem, ...], ...]
    source: str = ""

    def make(self, request: Request) -> Schedule:
        """Resolves the names and makes the schedule.

        Raises:
            ScheduleError: A name is unknown or not run once a microbatch in its row, or the rows
                do not fit the program's ranks.
        """
        problems: list[str] = []
        if len(self.rows) != request.num_ranks:
            what = (
                f"The custom schedule has `{len(self.rows)}` rows, but the program has "
                f"`{request.num_ranks}` ranks."
            )
            way = "give one row for every submesh that holds stages, in the order of stages"
            raise ScheduleError(message(what, where=self.source, ways=[way]))
        rows = tuple(_resolved(row, rank, request, problems) for rank, row in enumerate(self.rows))
        if problems:
            ways = [_known_names(request.names)]
            raise ScheduleError(
                message(listed([*dict.fromkeys(problems)]), where=self.source, ways=ways)
            )
        placement = request.placement or schedule_of_rows(rows, source=self.source).placement
        return Schedule("custom", rows, placement, request.num_microbatches)


def custom(rows: str | Sequence[RowLike]) -> CustomRows:
    r"""A schedule from rows, one a rank, in the order of stages.

    Args:
        rows: Text with one line a rank (`"0F0 0BW0\n1F0 1BW0"`), or a sequence with one row a
            rank. Such a row is a line of text, or a sequence of actions, of their text, of
            `(microbatch, task name)`, or of task names, whose microbatches are numbered by their
            occurrence in the row. Names match exactly.

    Returns:
        A rule, to be given as `schedule=` or to `make_schedule`, which then finds the tasks.

    Raises:
        ScheduleError: A word of the text is no action, or an item of a row none of the above.

    >>> rows = custom(["0F0 0F1 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"])
    >>> make_schedule(rows, num_ranks=2, num_microbatches=2).placement
    (0, 1)
    """
    if isinstance(rows, str):
        return CustomRows(parse_rows(rows))
    problems: list[str] = []
    found = tuple(_items(row, number, problems) for number, row in enumerate(rows))
    if problems:
        ways = ["give actions, their text, task names or `(microbatch, task name)`"]
        raise ScheduleError(message(listed(problems), ways=ways))
    return CustomRows(found)


def from_file(path: str | PathLike[str]) -> CustomRows:
    """A schedule from a text file with one line of actions a rank.

    Raises:
        ScheduleError: The file cannot be read, or a word of it is no action.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"The schedule file `{path}` cannot be read: {error}.") from error
    return CustomRows(parse_rows(text, source=str(path)), source=str(path))


def _items(row: RowLike, number: int, problems: list[str]) -> tuple[RowItem, ...]:
    if isinstance(row, str):
        return parse_rows(row if row.strip() else "-")[0]
    items: list[RowItem] = []
    for item in row:
        match item:
            case Action() | Pair() | str():
                items.append(item)
            case [int(microbatch), str(name)]:
                items.append((microbatch, name))
            case _:
                problems.append(f"Row `{number}` holds `{item!r}`, which names no action.")
    return tuple(items)


def _known_names(names: Mapping[str, Parts]) -> str:
    known = ", ".join(f"`{name}`" for name in names)
    actions = "actions such as `2F0`"
    return f"use the names of tasks ({known}) or {actions}" if known else f"use {actions}"


def _resolved(row: tuple[RowItem, ...], rank: int, request: Request, problems: list[str]) -> Row:
    """The actions of a row. Several tasks of one action run where the first of them stands."""
    entries: list[Entry] = []
    seen: dict[str, list[int]] = {}
    placed: set[tuple[Part, int]] = set()
    for item in row:
        named = _named(item, request.names, seen)
        if named is None:
            entry = _entry(item, rank, problems)
            entries += [entry] if entry else []
            continue
        name, microbatch = named
        seen.setdefault(name, []).append(microbatch)
        for part in _parts(request.names[name]):
            if (part, microbatch) not in placed:
                placed.add((part, microbatch))
                entries.append(Action(part.kind, part.stage, microbatch))
    problems += _miscounts(seen, rank, request.num_microbatches)
    return tuple(entries)


def _parts(parts: Parts) -> tuple[Part, ...]:
    if parts is None:
        return ()
    return (parts,) if isinstance(parts, Part) else parts


def _named(
    item: RowItem, names: Mapping[str, Parts], seen: dict[str, list[int]]
) -> tuple[str, int] | None:
    """The task and microbatch that an item names, or None if it names no known task."""
    if isinstance(item, tuple):
        return (item[1], item[0]) if item[1] in names else None
    if isinstance(item, str) and item in names:
        return item, len(seen.get(item, ()))
    return None


def _entry(item: RowItem, rank: int, problems: list[str]) -> Entry | None:
    if isinstance(item, Action | Pair):
        return item
    if isinstance(item, str) and is_entry(item):
        return parse_entry(item)
    name, of = (item, "") if isinstance(item, str) else (item[1], f" of microbatch `{item[0]}`")
    actions = " and no action" if isinstance(item, str) else ""
    problems.append(f"`{name}`{of} in row `{rank}` is no task{actions}.")
    return None


def _miscounts(seen: dict[str, list[int]], rank: int, num_microbatches: int) -> list[str]:
    problems: list[str] = []
    for name, microbatches in seen.items():
        if sorted(microbatches) != list(range(num_microbatches)):
            times = len(microbatches)
            what = (
                f"runs `{times}` times"
                if times != num_microbatches
                else (f"runs microbatches `{sorted(microbatches)}`")
            )
            problems.append(
                f"Task `{name}` {what} in row `{rank}`; it runs once for each of the "
                f"`{num_microbatches}` microbatches."
            )
    return problems
