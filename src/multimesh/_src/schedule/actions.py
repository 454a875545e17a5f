"""Actions, the steps of a schedule, and their text.

An action is written `<stage><kind><microbatch>`, as `2F0`, `1B3`, `0W1` or `0BW2`; two actions
that run as one overlapped task are written `[0F3|7BW1]`. A schedule is one line of them a rank; a
rank without actions is the line `-`. Text after `#` is a comment.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from multimesh._src.errors import ScheduleError, listed, message

_ACTION = re.compile(r"(\d+)(BW|F|B|W)(\d+)")
_PAIR = re.compile(r"\[([^\[\]|]*)\|([^\[\]|]*)\]")
_GRAMMAR = (
    "write an action as `<stage><kind><microbatch>` with kind F, B, W or BW, as in `2F0`, "
    "and an overlapped pair as `[0F3|7BW1]`"
)


class Kind(StrEnum):
    """What an action computes. `BW` is `B` and `W` of one stage as one task."""

    F = "F"  # forward
    B = "B"  # gradient of the activations
    W = "W"  # gradient of the weights
    BW = "BW"


@dataclass(frozen=True, slots=True)
class Action:
    """One run-time step: a kind of one stage for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two actions of one rank that run as one task, so that they can overlap."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"[{self.first}|{self.second}]"


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One run of a task that is no action of a rank (see `graph.OutsideTask`)."""

    name: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}:{self.microbatch}"


Entry: TypeAlias = Action | Pair
Row: TypeAlias = tuple[Entry, ...]


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The one or two actions of an entry of a row."""
    return (entry,) if isinstance(entry, Action) else (entry.first, entry.second)


def print_row(row: Iterable[Entry]) -> str:
    """The text of one row, which `parse_row` reads back."""
    return " ".join(map(str, row)) or "-"


def print_rows(rows: Iterable[Iterable[Entry]]) -> str:
    """The text of all rows, one line a rank."""
    return "\n".join(map(print_row, rows))


def parse_entry(text: str) -> Entry:
    """Reads one action or pair.

    Raises:
        ScheduleError: `text` is neither.
    """
    pair = _PAIR.fullmatch(text)
    parts = pair.groups() if pair else (text,)
    found = [_ACTION.fullmatch(part) for part in parts]
    actions = [Action(Kind(f[2]), int(f[1]), int(f[3])) for f in found if f]
    if len(actions) < len(parts):
        raise ScheduleError(message(f"`{text}` is not an action.", ways=[_GRAMMAR]))
    return Pair(*actions) if pair else actions[0]


def parse_row(line: str) -> Row:
    """Reads the actions of one rank.

    Raises:
        ScheduleError: A word of the line is no action.
    """
    return parse_rows(line + "\n" if line.strip() else "-")[0]


def parse_rows(text: str, *, source: str = "") -> tuple[Row, ...]:
    """Reads one row a line; blank lines and comments do not count.

    Args:
        text: Lines of actions separated by blanks.
        source: Where the text comes from, for errors; usually a file name.

    Raises:
        ScheduleError: A word is no action; names the line and points at the word.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = [*re.finditer(r"\S+", line.partition("#")[0])]
        if not words:
            continue
        if [w[0] for w in words] == ["-"]:
            rows.append(())
            continue
        wrong = [w for w in words if not is_entry(w[0])]
        problems += [_point_at(line, number, w.start(), w[0]) for w in wrong]
        if not wrong:
            rows.append(tuple(parse_entry(w[0]) for w in words))
    if problems:
        _refuse(problems, source)
    return tuple(rows)


def is_entry(word: str) -> bool:
    """Whether a word is an action or a pair."""
    pair = _PAIR.fullmatch(word)
    return all(_ACTION.fullmatch(part) for part in (pair.groups() if pair else (word,)))


def _point_at(line: str, number: int, column: int, word: str) -> str:
    left = max(0, column - 30)
    shown = line[left : column + len(word) + 30]
    arrow = " " * (column - left) + "^" * len(word)
    return f"`{word}` in line {number} is not an action:\n    {shown}\n    {arrow}"


def _refuse(problems: Sequence[str], source: str) -> None:
    raise ScheduleError(message(listed(problems), where=source, ways=[_GRAMMAR]))
