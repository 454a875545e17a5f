"""The tables of a report, in the order in which they are read."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from multimesh._src.report.flops import HOW
from multimesh._src.report.sites import LineNames
from multimesh._src.report.stacks import stacks_table
from multimesh._src.report.tables import Table, amount, common_names, count, merge_rows, shorten

if TYPE_CHECKING:
    from multimesh._src.report.arguments import ArgumentReport
    from multimesh._src.report.program import ProgramReport, TaskReport
    from multimesh._src.report.traffic import Reshard

MAX_ROWS = 40
"""Longest table of reshards and of code; the rest is summed up."""

MAX_NAMES = 24
"""Most names that are listed of one kind of arguments."""

_WHYS = {
    "argument": "an argument that lives elsewhere",
    "constant": "a closed-over array that lives elsewhere",
    "value": "a value",
    "gradient": "a gradient",
    "saved": "a value for the backward",
    "carried": "what the loop carries or sums up",
    "result": "a result",
    "layout": "another layout on the same devices",
    "view": "a view",
}


def tables(report: "ProgramReport", lines: LineNames) -> Iterator[Table]:
    """Yields the tables that have rows."""
    made = (
        _submeshes(report),
        _tasks(report, lines),
        _reshards(report, lines),
        _arguments(report),
        stacks_table(report.stacks),
        _code(report, lines),
        _registrations(report, lines),
    )
    return (table for table in made if table.rows)


def _submeshes(report: "ProgramReport") -> Table:
    rows = tuple(
        (
            s.label,
            s.devices,
            s.axes or "-",
            amount(s.state_bytes, "B"),
            amount(s.peak_bytes, "B"),
            f"{s.residual_sets}, {amount(s.residual_bytes, 'B')}" if s.residual_sets else "-",
            amount(s.flops, "FLOP"),
        )
        for s in report.submeshes
    )
    columns = ("submesh", "devices", "axes", ">state", ">peak", ">residuals", ">work a call")
    return Table(
        "Submeshes and their memory",
        columns,
        rows,
        note="state: arguments and constants on one device; peak: the most that one device holds "
        "in a call, without what XLA needs inside a program; residuals: sets that the schedule "
        "keeps at most, and their size, of whole arrays.",
    )


def _tasks(report: "ProgramReport", lines: LineNames) -> Table:
    rows = [
        (
            (task.label,),
            _action(task),
            task.submesh,
            str(task.num_runs),
            amount(task.flops, ""),
            amount(task.input_bytes, "B"),
            amount(task.output_bytes, "B"),
            f"{len(task.parameters)}, {amount(task.parameter_bytes, 'B')}",
            lines.short(task.origin) or "-",
        )
        for task in report.tasks
    ]
    columns = ("task", "action", "submesh", ">runs", ">FLOP", ">reads", ">writes", ">parameters")
    return Table(
        "Tasks",
        (*columns, "begins at"),
        merge_rows(rows),
        note="Of one run: what it reads and writes, and how many of the arrays that it reads are "
        "arguments of the function (parameters and state, no microbatches), of whole arrays. "
        "action: stage and F (forward), B, W (halves of the backward) or BW (all of it); before "
        "and after: once, outside of the loops. `main` is code in no registered scope. " + HOW,
        num_optional=1,
    )


def _action(task: "TaskReport") -> str:
    if task.stage >= 0:
        return f"{task.stage}{task.kind}"
    return task.when or task.kind or "-"


def _reshards(report: "ProgramReport", lines: LineNames) -> Table:
    moved = sorted((r for r in report.reshards if r.bytes), key=lambda r: -r.bytes)
    views = [r for r in report.reshards if not r.bytes]
    shown, rest = moved[:MAX_ROWS], moved[MAX_ROWS:]
    rows = tuple(
        (
            (r.value if r.source in ("argument", "constant") else r.source,),
            r.type,
            r.edge,
            str(r.copies),
            amount(r.bytes, "B"),
        )
        for r in shown
    )
    details = tuple(_why(r, lines) for r in shown)
    more = amount(sum(r.bytes for r in rest), "B")
    note = f"And {count(len(rest), 'value')} more, {more}. " if rest else ""
    if views:
        note += f"{count(len(views), 'copy', 'copies')} of what lies there already: 0 B. "
    total = amount(sum(r.bytes for r in moved), "B")
    return Table(
        f"Reshards: {total} a call, the largest first",
        ("value of", "type", "from -> to", ">copies", ">bytes"),
        rows,
        note=f"{note}bytes: in one call, what the target devices lack.",
        details=details,
    )


def _why(reshard: "Reshard", lines: LineNames) -> str:
    """Which value it is, and who reads it where."""
    made = f", made in {reshard.made.text(lines)}" if reshard.made is not None else ""
    read = ""
    if reshard.used is not None:
        read = f", read in {reshard.used.text(lines)}"
    names = reshard.target.split(", ")
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    maybe = "; it crosses even if its branch is not taken" if reshard.conditional else ""
    return f"{_WHYS[reshard.why]}{made}{read}, by {shown}{maybe}"


def _arguments(report: "ProgramReport") -> Table:
    groups: dict[tuple[str, ...], list[ArgumentReport]] = {}
    for argument in report.arguments:
        groups.setdefault(_alike(argument), []).append(argument)
    known = [argument.name for argument in report.arguments]
    rows = tuple(
        (key[0], str(len(group)), amount(sum(argument.bytes for argument in group), "B"), *key[1:])
        for key, group in groups.items()
    )
    names = [common_names([a.name for a in group], known) for group in groups.values()]
    others = [name for name in report.everywhere if name not in known]
    note = (
        "moved: for arguments that lie as they did when the function was traced; `first call` "
        "means that the result that takes the argument's place comes back where it is wanted."
    )
    if others:
        note += f" Results that live everywhere: {', '.join(others[:MAX_ROWS])}."
    columns = ("lives on", ">arrays", ">bytes", "layout", "moved", "")
    details = tuple(_listed(found) for found in names)
    return Table("Arguments", columns, rows, note=note, details=details)


def _listed(names: Sequence[str]) -> str:
    short = shorten(names)
    more = f" and {len(short) - MAX_NAMES} more" if len(short) > MAX_NAMES else ""
    return ", ".join(short[:MAX_NAMES]) + more


def _alike(argument: "ArgumentReport") -> tuple[str, ...]:
    remarks = [f"in {argument.microbatches} microbatches"] if argument.microbatches else []
    remarks += ["donated"] if argument.donated else []
    remarks += [f"returned as {name}" for name in argument.returned_as]
    remarks += [f"came on {argument.came}"] if argument.came and argument.moved != "never" else []
    home, layout = argument.home or "-", argument.layout or "-"
    return home, layout, argument.moved, ", ".join(remarks)


def _code(report: "ProgramReport", lines: LineNames) -> Table:
    rows = tuple(
        (
            code.scope or "(no scope)",
            _line_ranges([lines.short(line) for line in code.lines]) or "-",
            code.submesh or "where it is read",
            code.tasks or ("-",),
        )
        for code in report.code
    )
    rest = f"And {count(len(rows) - MAX_ROWS, 'row')} more. " if len(rows) > MAX_ROWS else ""
    return Table(
        "Code in no registered scope",
        ("scope", "lines", "placed on", "in tasks"),
        rows[:MAX_ROWS],
        note=f"{rest}It runs where the fewest bytes cross, as part of the tasks named; what is "
        "cheap and reads nothing placed is computed by every task that reads it.",
    )


def _line_ranges(short: Sequence[str]) -> str:
    """Lines by file, neighbours joined: `model.py:3-5,9`."""
    numbers: dict[str, set[int]] = {}
    for line in short:
        file, _, number = line.rpartition(":")
        numbers.setdefault(file, set()).add(int(number))
    texts: list[str] = []
    for file, found in sorted(numbers.items()):
        ranges: list[list[int]] = []
        for number in sorted(found):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        listed = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
        texts.append(f"{file}:{listed}")
    return " ".join(texts)


def _registrations(report: "ProgramReport", lines: LineNames) -> Table:
    rows = tuple(
        (r.matcher, lines.short(r.where), r.matched or ("nothing",)) for r in report.registrations
    )
    return Table("Registrations", ("matcher", "registered at", "matched"), rows)
