"""Draws a measured call over time, one line a submesh.

    train_step: 41.2 ms, 250 us a column; waits: . for a task, ~ for a copy, h for the host
    stage=0  hh0F0--|0F1--|..........~0BW0----|0BW1-----|main-|
    stage=1  .....~~~1F+BW0-----|1F+BW1-----|.......main-|

A column is as wide as it takes to name most actions. After the last run of a submesh its line is
blank.
"""

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multimesh._src.report.tables import duration
from multimesh._src.report.timeline.calls import Call
from multimesh._src.report.timeline.events import Event

TASKS, COPY, HOST = ".", "~", "h"
WIDTH = 100
_COLUMNS_A_NAME = 2  # besides the name itself
_MAX_BANDS = 6
# ANSI background colours as in `schedule.grid`, the brighter one for every second run
_COLORS = {"F": (44, 104), "B": (42, 102), "BW": (42, 102), "W": (45, 105), "-": (47, 107)}
_FUSED_COLORS = (43, 103)


@dataclass(frozen=True, slots=True)
class _Block:
    """A stretch of time: what stands there, filled up with a character."""

    start: float
    end: float
    text: str
    fill: str
    color: int = 0


def draw(call: Call, width: int, color: bool | None) -> str:
    """Returns the drawing; see `Timeline.grid`."""
    terminal = sys.stdout.isatty()
    if width == 0:
        width = shutil.get_terminal_size().columns if terminal else WIDTH
    labels = call.step.submeshes
    margin = max(map(len, labels), default=0) + 2
    band = max(10, width - margin)
    rows = [_blocks(call, label) for label in labels]
    columns = _num_columns(call, band)
    unit = call.duration / columns
    rows = [_painted(row, unit) for row in rows]
    signs = f"{TASKS} for a task, {COPY} for a copy, {HOST} for the host"
    title = f"{call.name}: {duration(call.duration)}, {duration(unit)} a column"
    lines = textwrap.wrap(f"{title}; waits: {signs}", max(width, 40))
    for left in range(0, columns, band):
        lines += [""] if left else []
        for label, row in zip(labels, rows, strict=True):
            with_color = terminal if color is None else color
            text = "".join(_pieces(row, left, min(columns, left + band), with_color))
            lines.append((label.ljust(margin) + text).rstrip())
    return "\n".join(lines)


def _num_columns(call: Call, band: int) -> int:
    """As many columns as it takes to write the names of most actions, in a few bands."""
    actions = [event for event in call.runs if event.stage >= 0] or list(call.runs)
    wanted = sorted((len(e.action) + _COLUMNS_A_NAME) / max(e.duration, 1e-9) for e in actions)
    columns = call.duration * wanted[3 * len(wanted) // 4] if wanted else 0.0
    return band * min(_MAX_BANDS, max(1, math.ceil(columns / band)))


def _blocks(call: Call, label: str) -> Iterator[_Block]:
    at = 0.0
    events = sorted((e for e in call.runs if e.submesh == label), key=lambda e: e.start)
    for number, event in enumerate(events):
        waits = event.waits
        at = max(at, event.start - waits.total)
        # the host is waited for last, or between a run that ended and its copy: drawn last
        for seconds, sign in ((waits.task, TASKS), (waits.copy, COPY), (waits.host, HOST)):
            yield _Block(at, at + seconds, "", sign)
            at += seconds
        yield _Block(event.start, event.end, event.action, "-", _color(event, number))
        at = event.end


def _color(event: Event, number: int) -> int:
    return _COLORS.get(event.kind, _FUSED_COLORS)[number % 2]


@dataclass(frozen=True, slots=True)
class _Painted:
    """The columns of a block."""

    start: int
    end: int
    name: str
    fill: str
    color: int

    @property
    def text(self) -> str:
        """What is drawn: the name as far as it has room, and a bar at the end of a run."""
        length = self.end - self.start
        if not self.color:
            return self.fill * length
        return self.name[: length - 1].ljust(length - 1, self.fill) + "|"


def _painted(blocks: Iterator[_Block], unit: float) -> list[_Painted]:
    """Rounds times to columns; what is shorter than half a column may vanish.

    Tasks of one action that run back to back are one block.
    """
    found: list[_Painted] = []
    for block in blocks:
        start = max(round(block.start / unit), found[-1].end if found else 0)
        end = round(block.end / unit)
        if end <= start:
            continue
        last = found[-1] if found else None
        if last and block.color and (last.end, last.name) == (start, block.text):
            found[-1] = replace(last, end=end)
        else:
            found.append(_Painted(start, end, block.text, block.fill, block.color))
    return found


def _pieces(row: list[_Painted], left: int, right: int, color: bool) -> Iterator[str]:
    at = left
    for block in row:
        start, end = max(block.start, left), min(block.end, right)
        if start >= end:
            continue
        yield " " * (start - at)
        text = block.text[start - block.start : end - block.start]
        yield f"\033[30;{block.color}m{text}\033[0m" if color and block.color else text
        at = end
