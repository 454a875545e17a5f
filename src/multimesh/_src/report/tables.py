"""Tables as data and as plain text of a given width; a terminal gets the same text with styles.

Rows that differ only in their names become one row, whose names are shortened where they count up:

    layer1_fwd  stage=0  64 B             layer1_fwd ... layer3_fwd  stage=0  64 B
    layer2_fwd  stage=0  64 B      ->
    layer3_fwd  stage=0  64 B

What is too wide is wrapped, the widest column first, behind spaces, commas and other separators.
No word is cut off: one that is wider than its column goes on below.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.text import Text

from multimesh._src.report.labels import JOINT

WIDTH = 100
"""Characters a line of plain text."""

NAMES_WIDTH = 28
"""Widest a column of names is made where there is room for more."""

LONG_NAME = 44
"""Longest name that stays on one line where there is room."""

GAP = "  "
_UNIT = r"[kMGTP]?(?:B|FLOP)\b"
_SMALLEST = 6  # a column is never narrower, if it has something to show

Cell: TypeAlias = str | tuple[str, ...]
"""Text, or names that may be joined and wrapped."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Columns whose heading starts with `>` are aligned to the right.

    `details` may give for each row a line of text to be shown below it; `num_optional` columns at
    the right are left out where the width is not enough for all.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    details: tuple[str, ...] = ()
    num_optional: int = 0

    def as_text(self, width: int = WIDTH) -> str:
        """The table as plain text, without trailing blanks."""
        return "\n".join(line for line, _ in self._lines(width))

    def as_rich(self, width: int) -> Text:
        """The table for a terminal."""
        styled = (Text(line, style) for line, style in self._lines(width))
        return Text("\n").join(styled)

    def _lines(self, width: int) -> Iterator[tuple[str, str]]:
        """The lines with their styles."""
        cells = [[_atoms(cell) for cell in row] for row in self.rows]
        heads = [_atoms(column.lstrip(">")) for column in self.columns]
        shown = len(heads)
        while sum(_least_widths(heads[:shown], cells)) + len(GAP) * shown > width:
            if shown == len(heads) - self.num_optional:
                break
            shown -= 1
        widths = _fit(heads[:shown], cells, self._caps(width), width)
        right = [column.startswith(">") for column in self.columns[:shown]]
        yield self.title, "bold"
        yield from ((line, "bold") for line in _row(heads, widths, right))
        yield _line(["-" * size for size in widths], widths, right), "dim"
        for number, row in enumerate(cells):
            yield from ((line, "") for line in _row(row, widths, right))
            if self.details and self.details[number]:
                yield from ((line, "dim") for line in indented(self.details[number], width, 6))
        if self.note:
            yield from ((line, "dim italic") for line in indented(self.note, width, 2))

    def _caps(self, width: int) -> list[int]:
        """How wide each column may become if there is room: lists of names are wrapped."""
        caps: list[int] = []
        for column in zip(*self.rows, strict=True):
            names = [name for cell in column if isinstance(cell, tuple) for name in shorten(cell)]
            longest = max((len(_shortened(name)) for name in names), default=width)
            caps.append(max(NAMES_WIDTH, min(longest, LONG_NAME)) if names else width)
        return caps or [width] * len(self.columns)


def indented(text: str, width: int, indent: int, first: str = "") -> list[str]:
    """Returns the lines of a text, wrapped behind separators and indented."""
    lines = _wrap(_words(text, width - indent), width - indent)
    return [f"{(first or '').rjust(indent) if not i else ' ' * indent}{line}".rstrip()
            for i, line in enumerate(lines)]  # fmt: skip


# --- layout --------------------------------------------------------------------------------------


def _row(
    cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]
) -> Iterator[str]:
    wrapped = [_wrap(cell, size) for cell, size in zip(cells, widths, strict=False)]
    for line in itertools.zip_longest(*wrapped, fillvalue=""):
        yield _line(line, widths, right)


def _line(cells: Iterable[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    aligned = (
        cell.rjust(size) if to_right else cell.ljust(size)
        for cell, size, to_right in zip(cells, widths, right, strict=True)
    )
    return (GAP + GAP.join(aligned)).rstrip()


def _fit(
    heads: Sequence[Sequence[str]],
    rows: Sequence[Sequence[Sequence[str]]],
    caps: Sequence[int],
    width: int,
) -> list[int]:
    """Returns the widths of the columns; the widest ones are made narrower until all fit."""
    least = _least_widths(heads, rows)
    sizes = [
        max(
            len(line)
            for cell in (head, *(row[number] for row in rows))
            for line in _wrap(cell, caps[number])
        )
        for number, head in enumerate(heads)
    ]
    sizes = [max(size, low) for size, low in zip(sizes, least, strict=True)]
    excess = sum(sizes) + len(GAP) * len(sizes) - width
    while excess > 0:
        loose = [number for number, size in enumerate(sizes) if size > least[number]]
        loose = loose or [number for number, size in enumerate(sizes) if size > _SMALLEST]
        if not loose:
            break
        sizes[max(loose, key=sizes.__getitem__)] -= 1
        excess -= 1
    return sizes


def _least_widths(
    heads: Sequence[Sequence[str]], rows: Sequence[Sequence[Sequence[str]]]
) -> list[int]:
    """The widest part of each column that cannot be wrapped."""
    return [
        max(len(atom.rstrip()) for cell in (head, *(row[number] for row in rows)) for atom in cell)
        for number, head in enumerate(heads)
    ]


def _atoms(cell: Cell) -> list[str]:
    """The parts of a cell between which it may be wrapped, each with the blanks behind it."""
    if isinstance(cell, str):
        return _words(cell)
    names = shorten(cell)
    listed = [f"{name}, " for name in names[:-1]] + list(names[-1:])
    return [atom for name in listed for atom in _words(_shortened(name))] or [""]


def _shortened(name: str) -> str:
    """A name; those of a long fused task are shortened like a list."""
    if len(name) <= NAMES_WIDTH:
        return name
    end = ", " if name.endswith(", ") else ""
    return f" {JOINT} ".join(shorten(name.removesuffix(", ").split(JOINT))) + end


def _words(text: str, longest: int = NAMES_WIDTH // 2) -> list[str]:
    """Words with the blanks behind them; those longer than `longest` also end behind separators."""
    words = re.findall(rf"[\d.]+ {_UNIT}\S*\s*|\S+\s*", text) or [""]
    found: list[str] = []
    for word in words:
        long = len(word.rstrip()) > longest
        found += re.findall(r"[^/\],]*[/\],)]+\s*|[^/\],]+\s*", word) if long else [word]
    return found


def _wrap(atoms: Sequence[str], width: int) -> list[str]:
    """Fills lines with atoms; only an atom that is wider than a line is cut."""
    lines = [""]
    for atom in atoms:
        if lines[-1] and len(lines[-1]) + len(atom.rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        while len(atom.rstrip()) > width:
            lines[-1], atom = atom[:width], atom[width:]
            lines.append("")
        lines[-1] += atom
    return [line.rstrip() for line in lines if line.strip()] or [""]


# --- names and numbers ---------------------------------------------------------------------------


def merge_rows(rows: Sequence[tuple[Cell, ...]]) -> tuple[tuple[Cell, ...], ...]:
    """Joins neighbouring rows that differ only in their first cell, which must be names."""
    merged: list[tuple[Cell, ...]] = []
    for rest, group in itertools.groupby(rows, key=lambda row: row[1:]):
        names = (name for first, *_ in group for name in first)
        merged.append((tuple(names), *rest))
    return tuple(merged)


def shorten(names: Sequence[str]) -> tuple[str, ...]:
    """Replaces three or more names that count up or down by the first and the last one."""
    short: list[str] = []
    for run in _runs(names):
        short += run if len(run) < 3 else [f"{run[0]} ... {run[-1]}"]
    return tuple(short)


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    """Cuts names into longest runs in which one number counts up or down."""
    run: list[str] = []
    last: tuple[int, int] | None = None
    for name in names:
        step = _counted(run[-1], name) if run else None
        if step is not None and last in (None, step):
            run.append(name)
            last = step
            continue
        if run:
            yield run
        run, last = [name], None
    if run:
        yield run


def _counted(before: str, after: str) -> tuple[int, int] | None:
    """Which of its numbers a name counts, and whether by 1 or -1; None if it differs otherwise."""
    one, other = re.split(r"(\d+)", before), re.split(r"(\d+)", after)
    if len(one) != len(other):
        return None
    differ = [i for i, parts in enumerate(zip(one, other, strict=True)) if parts[0] != parts[1]]
    if len(differ) != 1 or differ[0] % 2 == 0:
        return None
    step = int(other[differ[0]]) - int(one[differ[0]])
    return (differ[0], step) if step in (1, -1) else None


def common_names(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Replaces names by those of the subtrees in which all known names are among them.

    `state[0]['w'], state[0]['b'], state[1]['w']` of these and `state[1]['b']` are
    `state[0], state[1]['w']`.
    """
    keys = {name: _keys(name) for name in dict.fromkeys((*known, *names))}
    below: dict[tuple[str, ...], int] = {}
    inside: dict[tuple[str, ...], int] = {}
    for name in keys:
        for length in range(1, len(keys[name]) + 1):
            prefix = keys[name][:length]
            below[prefix] = below.get(prefix, 0) + 1
    for name in dict.fromkeys(names):
        for length in range(1, len(keys[name]) + 1):
            prefix = keys[name][:length]
            inside[prefix] = inside.get(prefix, 0) + 1
    found: dict[str, None] = {}
    for name in names:
        prefixes = (keys[name][:length] for length in range(1, len(keys[name]) + 1))
        found["".join(next(p for p in prefixes if inside[p] == below[p]))] = None
    return tuple(found)


def _keys(name: str) -> tuple[str, ...]:
    """`state[0].mu['w']` -> `state`, `[0]`, `.mu`, `['w']`."""
    return tuple(re.findall(r"\['[^']*'\]|\[[^\]]*\]|\.[^.\[]+|[^.\[]+", name)) or (name,)


def count(number: int, one: str, many: str = "") -> str:
    """Returns a number of things, as `1 copy`, `3 copies`; `many` is the plural if it is no `s`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


_UNITS = ("", "k", "M", "G", "T", "P")


def amount(number: float, unit: str) -> str:
    """Returns a number of bytes or operations, as `96 B`, `1.5 kB`, `12 MFLOP`."""
    size, power = float(number), 0
    while size >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    text = f"{size:.0f}" if power == 0 or size >= 99.95 else f"{size:.3g}"
    return f"{text} {_UNITS[power]}{unit}"


def duration(seconds: float) -> str:
    """Returns a time, as `1.25 s`, `41.2 ms`, `310 us`; `0` below 5 ns."""
    if abs(seconds) < 5e-9:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def share(part: float, whole: float) -> str:
    """Returns a share in percent, as `4.2 %`."""
    return f"{100 * part / whole:z.1f} %" if whole else "-"


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
