"""Shows a `ProgramReport`: plain text for logs and tests, the same with styles for terminals.

`str(staged.explain())` is the text, `rich.print(staged.explain())` fills the terminal's width.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from multimesh._src.report.findings import Finding, find_findings
from multimesh._src.report.sections import tables
from multimesh._src.report.sites import LineNames, line_names
from multimesh._src.report.tables import WIDTH, amount, count, indented
from multimesh._src.schedule.grid import grid

if TYPE_CHECKING:
    from multimesh._src.report.program import LoopReport, ProgramReport

MAX_DRAWN_MICROBATCHES = 64
"""Longer loops are summarised, not drawn."""

_MAX_LOOPS = 3  # that the summary lists

MAX_SHARES = 8
"""Most submeshes whose share of the work the summary lists."""


def as_text(report: "ProgramReport") -> str:
    """Returns the report as plain text, without trailing blanks."""
    lines = _line_names(report)
    findings = find_findings(report, lines)
    parts = ["\n".join(summary(report, findings))]
    if findings:
        parts.append("\n".join(["Worth a look", *_listed(findings, WIDTH)]))
    parts += [table.as_text() for table in tables(report, lines)]
    for loop in report.loops:
        drawn = textwrap.indent(_drawing(loop, WIDTH - 2, color=False), "  ")
        parts.append("\n".join([*_loop_title(loop, WIDTH), drawn]).rstrip())
        for remark in _remarks(loop):
            parts[-1] += "".join(f"\n{line}" for line in indented(remark, WIDTH, 2))
    return "\n\n".join(parts)


def as_rich(report: "ProgramReport", width: int) -> Iterator[RenderableType]:
    """Yields what rich prints."""
    lines = _line_names(report)
    findings = find_findings(report, lines)
    first, *rest = summary(report, findings, width)
    yield Text(first, "bold")
    yield Text("\n".join(rest))
    if findings:
        yield Text("\nWorth a look", "bold")
        yield Text("\n".join(_listed(findings, width)))
    for table in tables(report, lines):
        yield Text()
        yield table.as_rich(width)
    for loop in report.loops:
        yield Text()
        yield Text("\n".join(_loop_title(loop, width)), style="bold")
        yield Text.from_ansi(_drawing(loop, width, color=True))
        for remark in _remarks(loop):
            yield Text("\n".join(indented(remark, width, 2)))


def _line_names(report: "ProgramReport") -> LineNames:
    """Short names of all lines that a report names."""
    sites = [site for r in report.reshards for site in (r.made, r.used) if site is not None]
    sites += [whole.site for whole in report.whole]
    sites += [unmapped.sites[0] for unmapped in report.unmapped]
    lines = [site.line for site in sites]
    lines += [task.origin for task in report.tasks]
    lines += [line for code in report.code for line in code.lines]
    lines += [registration.where for registration in report.registrations]
    lines += [whole.line for loop in report.loops for whole in loop.whole]
    return line_names(lines)


# --- summary -------------------------------------------------------------------------------------


def summary(
    report: "ProgramReport", findings: Sequence[Finding], width: int = WIDTH
) -> tuple[str, ...]:
    """Returns what to know first, in about ten lines."""
    facts = [
        ("one call", _call(report)),
        ("work", _work(report)),
        ("state", _state(report)),
        *_loops(report.loops),
        ("worth a look", _topics(findings)),
    ]
    lines = indented(f"{report.name}: {_counts(report)}.", width, 0)
    for label, text in facts:
        lines += indented(text, width, 16, f"  {label:<14}")
    return tuple(lines)


def _loops(loops: Sequence["LoopReport"]) -> Iterator[tuple[str, str]]:
    """The pipelines before other loops, as many as a headline takes."""
    ordered = sorted(loops, key=lambda loop: loop.simulation is None)
    for loop in ordered[:_MAX_LOOPS]:
        yield _loop_label(loop), _loop_fact(loop)
    if len(loops) > _MAX_LOOPS:
        yield "", f"and {count(len(loops) - _MAX_LOOPS, 'more loop')}, below"


def _counts(report: "ProgramReport") -> str:
    tasks = count(len(report.tasks), "task")
    submeshes = count(len(report.submeshes), "submesh", "submeshes")
    programs = count(report.num_executables, "program")
    same = report.num_executables - report.num_bodies
    shared = f" ({report.num_bodies} but for their devices)" if same else ""
    return f"{tasks} on {submeshes}, {programs} to compile{shared}"


def _call(report: "ProgramReport") -> str:
    runs = count(sum(task.num_runs for task in report.tasks), "run")
    copies = count(report.num_copies, "copy", "copies")
    values = count(sum(reshard.copies for reshard in report.reshards), "value")
    crossing = amount(sum(reshard.bytes for reshard in report.reshards), "B")
    return f"{runs} of tasks, {copies} with {values}, {crossing} between devices"


def _work(report: "ProgramReport") -> str:
    total = sum(submesh.flops for submesh in report.submeshes)
    working = [submesh for submesh in report.submeshes if submesh.flops]
    if not working:
        return "0 FLOP"
    shares = [f"{s.label} {s.flops / total:.0%}" for s in working[:MAX_SHARES]]
    more = f" and {len(working) - MAX_SHARES} more" if len(working) > MAX_SHARES else ""
    return f"{amount(total, 'FLOP')}: {', '.join(shares)}{more}"


def _state(report: "ProgramReport") -> str:
    size = amount(sum(argument.bytes for argument in report.arguments), "B")
    most = max(report.submeshes, key=lambda submesh: submesh.peak_bytes)
    return (
        f"{size} in {count(len(report.arguments), 'argument array')}; a device holds at most "
        f"{amount(most.peak_bytes, 'B')} in a call (on {most.label})"
    )


def _loop_label(loop: "LoopReport") -> str:
    return f"loop of {loop.length}" if loop.length else "while loop"


def _loop_fact(loop: "LoopReport") -> str:
    s = loop.simulation
    if s is None:
        return f"{count(len(loop.tasks), 'task')}, turn by turn"
    sets = max(s.peaks.until_w, default=0)
    return (
        f"{s.schedule.name} on {count(s.graph.num_ranks, 'rank')}, makespan {s.makespan:g}, idle "
        f"{s.bubble_share:.1%}, at most {count(sets, 'residual set')} a rank"
    )


def _topics(findings: Sequence[Finding]) -> str:
    topics: dict[str, int] = {}
    for finding in findings:
        topics[finding.topic] = topics.get(finding.topic, 0) + 1
    named = (f"{topic} ({n})" if n > 1 else topic for topic, n in topics.items())
    return ", ".join(named) or "nothing"


def _listed(findings: Sequence[Finding], width: int) -> Iterator[str]:
    for finding in findings:
        yield from indented(f"{finding.topic}: {finding.text}", width, 4, "- ")
        for way in finding.ways:
            yield from indented(way, width, 7, "-> ")


# --- loops ---------------------------------------------------------------------------------------


def _loop_title(loop: "LoopReport", width: int) -> list[str]:
    kind = "sequential loop" if loop.simulation is None else "microbatch loop"
    named = [*loop.tasks[:4], *([f"and {len(loop.tasks) - 4} more"] if loop.tasks[4:] else [])]
    head = f"Schedule of a {kind}: {loop.length} x" if loop.length else "While loop:"
    text = f"{head} {', '.join(named)}"
    return indented(text, width, 0)


def _remarks(loop: "LoopReport") -> Iterator[str]:
    """Says what the schedule keeps, and in which unit its times are."""
    if loop.simulation is None:
        return
    peaks = loop.simulation.peaks
    yield (
        "Simulated; the unit of time is one F, one B or one W of a stage (a BW takes two); copies "
        "take none."
    )
    if any(peaks.until_w):
        sets = f"at most {_by_rank(peaks.until_b)} residual sets"
        if peaks.until_w != peaks.until_b:
            sets += f" until B, {_by_rank(peaks.until_w)} until W"
        sizes = ", ".join(amount(int(size), "B") for size in peaks.num_bytes)
        yield f"By rank: {sets}; with {sizes}, of whole arrays."


def _by_rank(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _drawing(loop: "LoopReport", width: int, *, color: bool) -> str:
    if loop.length == 0:
        return (
            "The host reads the condition before each iteration; every number above counts one "
            "iteration."
        )
    if loop.simulation is None:
        return "one iteration after the other"
    if loop.simulation.schedule.num_microbatches > MAX_DRAWN_MICROBATCHES:
        s = loop.simulation
        return f"{s.schedule.name}: makespan {s.makespan:g}, idle {s.bubble_share:.1%}"
    return grid(loop.simulation, width=width, color=color)
