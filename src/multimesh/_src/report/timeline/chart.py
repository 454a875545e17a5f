"""Draws a measured call, and below it its simulated schedule, as an image (extra `viz`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimesh._src.errors import DebugError, message
from multimesh._src.report.timeline.calls import Call
from multimesh._src.schedule.actions import Action, Entry, TaskRun
from multimesh._src.schedule.simulate import Simulation

_COLORS = {"F": "#4c78a8", "B": "#54a24b", "BW": "#54a24b", "W": "#b279a2", "-": "#9d9d9d"}
_FUSED_COLOR = "#e0a030"
_WAIT_COLORS = {"task": "#f2f2f2", "copy": "#f5b7b1", "host": "#e45756"}
_WAITS = {"task": "waits for a task", "copy": "waits for a copy", "host": "waits for the host"}
_KINDS = {
    "F": "forward",
    "BW": "backward",
    "W": "weight gradient",
    "+": "fused tasks",
    "-": "outside of the loop",
}
_MAX_NAMED = 400
_ROW_HEIGHT = 0.45


def plot(call: Call, simulation: Simulation | None, path: Path) -> None:
    """Writes the image; its format is that of the file's suffix.

    Raises:
        DebugError: matplotlib is not installed.
    """
    figure_class = _figure_class()
    heights = [len(call.step.submeshes)] + ([simulation.graph.num_rows] if simulation else [])
    figure = figure_class(figsize=(12, 1.6 * len(heights) + _ROW_HEIGHT * sum(heights) + 0.4))
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights, sharex=True)
    measured = panels[0][0]
    _draw_call(measured, call)
    measured.set_title(f"{call.name}, measured: {call.duration * 1e3:.4g} ms", loc="left")
    if simulation is not None:
        begin = min((e.start for e in call.runs if e.info.nodes), default=0.0)
        simulated = panels[1][0]
        _draw_simulation(simulated, simulation, begin)
        name, makespan = simulation.schedule.name, simulation.makespan * 1e3
        title = f"{name}, simulated with the measured times: {makespan:.4g} ms"
        simulated.set_title(title, loc="left")
    panels[-1][0].set_xlabel("ms")
    _legend(figure, call)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DebugError(
            message(
                "`Timeline.plot` needs matplotlib, which is not installed.",
                ways=(
                    "`pip install 'multimesh-jax[viz]'`.",
                    "`timeline.save(path)` writes a trace for https://ui.perfetto.dev, "
                    "`timeline.grid()` draws as text.",
                ),
            )
        ) from error
    return Figure


def _draw_call(axes: Any, call: Call) -> None:
    rows = {label: number for number, label in enumerate(call.step.submeshes)}
    for event in call.runs:
        row = rows[event.submesh]
        at = event.start - event.waits.total
        for name in ("task", "copy", "host"):
            seconds = getattr(event.waits, name)
            _box(axes, row, at, at + seconds, _WAIT_COLORS[name])
            at += seconds
        text = event.action if len(call.runs) <= _MAX_NAMED else ""
        color = _COLORS.get(event.kind, _FUSED_COLOR)
        _box(axes, row, event.start, event.end, color, text, call.duration)
    _finish(axes, list(rows))


def _draw_simulation(axes: Any, simulation: Simulation, begin: float) -> None:
    events = zip(simulation.order, simulation.starts, simulation.ends, strict=True)
    named = len(simulation.starts) <= _MAX_NAMED
    for (row, what), start, end in events:
        text = str(what) if named else ""
        color = _COLORS.get(_kind(what), _FUSED_COLOR)
        _box(axes, row, begin + start, begin + end, color, text, simulation.makespan)
    _finish(axes, [simulation.graph.label(row) for row in range(simulation.graph.num_rows)])


def _kind(what: Entry | TaskRun) -> str:
    if isinstance(what, Action):
        return what.kind
    return "-" if isinstance(what, TaskRun) else "pair"


def _box(
    axes: Any, row: int, start: float, end: float, color: str, text: str = "", whole: float = 1.0
) -> None:
    width = (end - start) * 1e3
    if width <= 0.0:
        return
    edge = "white" if text else color
    axes.broken_barh([(start * 1e3, width)], (row - 0.4, 0.8), facecolor=color, edgecolor=edge)
    if (end - start) / whole > 0.007 * len(text):
        middle = (start + end) / 2 * 1e3
        axes.text(middle, row, text, ha="center", va="center", fontsize=7, clip_on=True)


def _finish(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _legend(figure: Any, call: Call) -> None:
    """Names the colours that occur."""
    entries = list(_entries(call))
    colors = [color for color, _ in entries]
    from matplotlib.patches import Patch  # pyright: ignore[reportMissingImports]

    patches = [Patch(facecolor=color, edgecolor="#cccccc") for color in colors]
    texts = [text for _, text in entries]
    figure.legend(patches, texts, loc="lower left", ncols=len(texts), fontsize=8, frameon=False)


def _entries(call: Call) -> Iterator[tuple[str, str]]:
    kinds = {event.kind for event in call.runs}
    for kind, text in _KINDS.items():
        occurs = kind in kinds or (kind == "BW" and "B" in kinds)
        if kind == "+":
            occurs = any("+" in other for other in kinds)
        if occurs:
            yield _COLORS.get(kind, _FUSED_COLOR), text
    for name, text in _WAITS.items():
        yield _WAIT_COLORS[name], text
