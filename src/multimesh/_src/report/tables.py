"""Tables as data, as plain text and as tables of rich.

Rows that differ only in their names become one row, whose names are shortened where they count up:

    layer1_fwd  stage=0  64 B             layer1_fwd ... layer3_fwd  stage=0  64 B
    layer2_fwd  stage=0  64 B      ->
    layer3_fwd  stage=0  64 B
"""

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from multimesh._src.report.labels import JOINT

NAMES_WIDTH = 28
"""Widest a column of names may be before it is wrapped."""

Cell = str | tuple[str, ...]
"""Text, or names that may be joined and wrapped."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Columns whose heading starts with `>` are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def as_text(self) -> str:
        """The table as plain text, without trailing blanks."""
        heads = [column.lstrip(">") for column in self.columns]
        rows = [[_lines(cell) for cell in row] for row in self.rows]
        widths = [
            max(len(line) for line in (head, *itertools.chain.from_iterable(cells)))
            for head, cells in zip(heads, zip(*rows, strict=True), strict=True)
        ]
        right = [column.startswith(">") for column in self.columns]

        def line(cells: Iterable[str]) -> str:
            aligned = (
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(cells, widths, right, strict=True)
            )
            return ("  " + "  ".join(aligned)).rstrip()

        lines = [self.title, line(heads), line("-" * width for width in widths)]
        lines += [
            line(cells) for row in rows for cells in itertools.zip_longest(*row, fillvalue="")
        ]
        lines += textwrap.wrap(self.note, 96, initial_indent="  ", subsequent_indent="  ")
        return "\n".join(lines)

    def as_rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(
            title=Text(self.title),
            title_style="bold",
            title_justify="left",
            caption=Text(self.note) if self.note else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            show_edge=False,
        )
        for number, column in enumerate(self.columns):
            justify = "right" if column.startswith(">") else "left"
            # the first column has names, which stay whole
            table.add_column(
                column.lstrip(">"), justify=justify, overflow="fold", no_wrap=number == 0
            )
        for row in self.rows:
            table.add_row(*(Text("\n".join(_lines(cell))) for cell in row))
        return table


def _lines(cell: Cell) -> list[str]:
    """The lines of a cell. Names are kept whole, but for long ones of fused tasks."""
    if isinstance(cell, str):
        return [cell]
    lines = [""]
    names = shorten(cell)
    for i, name in enumerate(names):
        pieces = _pieces(name)
        pieces[-1] += "," if i < len(names) - 1 else ""
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + 1 + len(piece) > NAMES_WIDTH:
                lines.append("")
            lines[-1] += f" {piece}" if lines[-1] else piece
    return lines


def _pieces(name: str) -> list[str]:
    if len(name) <= NAMES_WIDTH:
        return [name]
    *parts, last = shorten(name.split(JOINT))
    return [*(f"{part} {JOINT}" for part in parts), last]


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
