"""What a reader of a report should look at first: fallbacks, waste, and what may be a mistake.

idle: stage=3 (devices 6-7): no task runs there.
  -> register a scope for it, or make the mesh smaller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multimesh._src.report.sites import LineNames
from multimesh._src.report.tables import amount, common_names, count, shorten

if TYPE_CHECKING:
    from multimesh._src.report.program import CarryReport, LoopReport, ProgramReport

_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at: `topic` in a word or two, what it is, and ways to change it."""

    topic: str
    text: str
    ways: tuple[str, ...] = ()


def find_findings(report: "ProgramReport", lines: LineNames) -> tuple[Finding, ...]:
    """Returns what to look at, in the order of importance."""
    return (
        *_registrations(report, lines),
        *_unmapped(report, lines),
        *_idle(report),
        *_whole(report, lines),
        *_loops(report, lines),
        *_moved(report),
        *_shared(report),
    )


def _registrations(report: "ProgramReport", lines: LineNames) -> Iterator[Finding]:
    for registration in report.registrations:
        where = f"`{registration.matcher}` ({lines.short(registration.where)})"
        if not registration.matched and registration.shadowed:
            names = _listed(registration.shadowed)
            text = (
                f"{where} decides nothing: it touches {names}, but an earlier or inner one takes "
                "them, or its callback says that they are no tasks."
            )
            yield Finding("no match", text, ("register it before the others, or remove it.",))
        elif not registration.matched:
            ways = (
                "compare it with the scopes under `Code in no registered scope`; that may be "
                "right in a function that uses only some of the tasks.",
            )
            yield Finding("no match", f"{where} matched no scope of this function.", ways)
        elif registration.missing:
            numbers = _listed([str(number) for number in registration.missing])
            text = f"{where} is registered for layers that no scope has: {numbers}."
            ways = (
                "give `num_layers=` the number of the layers.",
                r"let the matcher take all digits of a number, as `layer\d+` does.",
            )
            yield Finding("no match", text, ways)


def _unmapped(report: "ProgramReport", lines: LineNames) -> Iterator[Finding]:
    if report.unmapped:
        names = [f"`{u.name}` in {u.sites[0].text(lines)}" for u in report.unmapped]
        text = f"sharding constraints name axes that no task maps: {_listed(names)}."
        ways = (
            "name an axis of the mesh, or map the name, by `Task(logical_axes=...)`; that may be "
            "right for dims that shall stay whole.",
        )
        yield Finding("not sharded", text, ways)


def _idle(report: "ProgramReport") -> Iterator[Finding]:
    if report.idle:
        ways = ("register a scope for it, or make the mesh smaller.",)
        yield Finding("idle", f"{', '.join(report.idle)}: no task runs there.", ways)
    for axis in report.unused_axes:
        name, _, size = axis.partition("=")
        text = f"no value is sharded over `{name}`: its {size} devices all do the same work."
        ways = (
            f'shard the batch, parameters or values: `with_sharding_constraint(x, P("{name}"))` in '
            "the model, or `in_shardings=`.",
        )
        yield Finding("unused axis", text, ways)


def _whole(report: "ProgramReport", lines: LineNames) -> Iterator[Finding]:
    for whole in report.whole:
        text = (
            f"the `{whole.primitive}` at {whole.site.text(lines)} touches {_listed(whole.inside)} "
            f"and runs whole on {whole.submesh}: what it reads of the others is copied there."
        )
        ways = ("put scopes of one submesh alone inside it, or open it (a Python `for`).",)
        yield Finding("not cut", text, ways)


def _loops(report: "ProgramReport", lines: LineNames) -> Iterator[Finding]:
    for loop in report.loops:
        if loop.whole:
            yield _whole_backward(loop, lines)
        if loop.simulation is not None:
            continue
        if loop.length and loop.carried:
            yield _sequential(loop, loop.carried)
        elif loop.is_microbatch and loop.holds_loops:
            yield _around_loops(loop)


def _sequential(loop: "LoopReport", carry: "CarryReport") -> Finding:
    text = (
        f"the loop of {loop.length} turns over {_listed(loop.tasks)} is run turn by turn, not "
        "pipelined: "
    )
    sums = "use `microbatch`, or let the loop carry sums only and divide after it"
    if carry.writer == carry.reader:
        text += (
            f"`{carry.writer}` does more than add to the {carry.type} that it keeps from turn to "
            "turn."
        )
        return Finding("sequential", text, (f"{sums}.",))
    text += (
        f"{carry.type} that `{carry.writer}` makes in one turn is read by `{carry.reader}` in the "
        "next."
    )
    return Finding("sequential", text, (f"where the turns are microbatches, {sums}.",))


def _around_loops(loop: "LoopReport") -> Finding:
    names = _listed(tuple(dict.fromkeys(loop.tasks)))
    text = (
        f"the {loop.length} microbatches of {names} are run turn by turn, without a schedule: a "
        "loop over several submeshes stands inside."
    )
    fixed = "a fixed number of turns in " if loop.holds_while else ""
    ways = (f"write the inner loop as {fixed}a Python `for`, or keep it on one submesh.",)
    return Finding("sequential", text, ways)


def _whole_backward(loop: "LoopReport", lines: LineNames) -> Finding:
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(w.task for w in loop.whole))
    kinds = " or ".join(f"a {name}" for name in dict.fromkeys(w.primitive for w in loop.whole))
    at = _listed([lines.short(line) for line in dict.fromkeys(w.line for w in loop.whole) if line])
    text = (
        f"Not split into B and W, because the contractions stand inside {kinds}: {names}"
        f"{f' ({at})' if at else ''}."
    )
    ways = ("write the layers of a stage out, or take a schedule without W.",)
    return Finding("whole backward", text, ways)


def _moved(report: "ProgramReport") -> Iterator[Finding]:
    moved = [a for a in report.arguments if a.moved == "every call"]
    known = [argument.name for argument in report.arguments]
    cut = [a for a in moved if a.microbatches]
    rest = [a for a in moved if not a.microbatches]
    batches = (
        "that is usual for batches; `prepare_batch(..., sharding=)` does it ahead of the step, "
        "with `compiled.input_shardings`.",
    )
    others = (
        "that is usual for what changes at every call; place the rest once, by `jax.device_put(x, "
        "sharding)` with that of `compiled.input_shardings`.",
    )
    for arguments, ways in ((cut, batches), (rest, others)):
        if arguments:
            names = common_names([a.name for a in arguments], known)
            size = amount(sum(a.bytes for a in arguments), "B")
            places = _listed(list(dict.fromkeys(a.home for a in arguments)))
            cut_text = " and stored microbatch by microbatch" if arguments is cut else ""
            text = f"at every call, {size} to {places}{cut_text}: {_listed(names)}."
            yield Finding("moved", text, ways)


def _shared(report: "ProgramReport") -> Iterator[Finding]:
    """Arguments that are copied from their owners to other submeshes in every call."""
    sizes: dict[str, int] = {}
    edges: dict[str, dict[str, None]] = {}
    for reshard in report.reshards:
        if reshard.why == "argument":
            sizes[reshard.value] = sizes.get(reshard.value, 0) + reshard.bytes
            edges.setdefault(reshard.value, {})[reshard.edge] = None
    if sizes:
        total = amount(sum(sizes.values()), "B")
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_MAX_NAMES]
        named = ", ".join(f"`{name}` ({', '.join(edges[name])})" for name in largest)
        more = f" and {len(sizes) - len(largest)} more" if len(sizes) > len(largest) else ""
        text = (
            f"{count(len(sizes), 'argument')} used on several submeshes: the owner sends "
            f"{total} a call: {named}{more}."
        )
        ways = ("that is what sharing costs; read it in scopes of one submesh to avoid it.",)
        yield Finding("shared", text, ways)


def _listed(names: "tuple[str, ...] | list[str]") -> str:
    """Names with commas, long lists cut short."""
    short = shorten(tuple(names))
    more = f" and {len(short) - _MAX_NAMES} more" if len(short) > _MAX_NAMES else ""
    return ", ".join(short[:_MAX_NAMES]) + more
