"""Writes calls in the Trace Event Format, which Perfetto and Chrome show.

process "submeshes"   a track for each submesh: its runs, with what they waited for
process "copies"      a track for each edge
process "host"        one track: what the host enqueued
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from multimesh._src.report.timeline.calls import Call
from multimesh._src.report.timeline.events import Event

_SUBMESHES, _COPIES, _HOST = 1, 2, 3
_PROCESSES = {_SUBMESHES: "submeshes", _COPIES: "copies", _HOST: "host"}


def write(calls: Sequence[Call], path: Path) -> None:
    """Writes the file."""
    path.write_text(json.dumps({"traceEvents": list(trace_events(calls))}) + "\n")


def trace_events(calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    """Yields all events of the format; times are in microseconds since the first call."""
    tracks: dict[tuple[int, str], int] = {(_HOST, "enqueues"): 0}
    for call in calls:
        for label in call.step.submeshes:
            tracks.setdefault((_SUBMESHES, label), len(tracks))
    first = min(call.began for call in calls)
    for call in calls:
        offset = call.began - first
        alone = ", alone" if call.alone else ""
        host = (_HOST, tracks[_HOST, "enqueues"])
        yield _slice(host, f"{call.name}{alone}", offset, offset + call.duration, {})
        for event in call.events:
            process = _COPIES if event.is_copy else _SUBMESHES
            name = event.label if event.is_copy else event.submesh
            track = (process, tracks.setdefault((process, name), len(tracks)))
            title = _title(event)
            yield _slice(track, title, offset + event.start, offset + event.end, _details(event))
            yield _slice(host, title, offset + event.begin, offset + event.enqueued, {})
    for process, name in _PROCESSES.items():
        yield _named("process_name", (process, 0), name)
    for (process, name), number in tracks.items():
        yield _named("thread_name", (process, number), name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process,
            "tid": number,
            "args": {"sort_index": number},
        }


def _title(event: Event) -> str:
    if event.is_copy:
        return "copy" if event.microbatch < 0 else f"copy of {event.microbatch}"
    return event.label if event.microbatch < 0 else f"{event.label}[{event.microbatch}]"


def _details(event: Event) -> dict[str, Any]:
    if event.is_copy:
        return {"microbatch": event.microbatch}
    return {
        "kind": event.kind,
        "stage": event.stage,
        "microbatch": event.microbatch,
        "waited for tasks (us)": round(event.waits.task * 1e6, 1),
        "waited for copies (us)": round(event.waits.copy * 1e6, 1),
        "waited for the host (us)": round(event.waits.host * 1e6, 1),
    }


def _slice(
    track: tuple[int, int], name: str, start: float, end: float, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": track[0],
        "tid": track[1],
        "ts": round(start * 1e6, 3),
        "dur": round((end - start) * 1e6, 3),
        "args": details,
    }


def _named(what: str, track: tuple[int, int], name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": track[0], "tid": track[1], "args": {"name": name}}
