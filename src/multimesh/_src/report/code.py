r"""What the registrations reached, and what became of the code that they did not.

register_task(r"layer\d+", ...)    matched layer0, layer1
register_task(r"decoder", ...)     matched nothing: no scope has it
loss at train.py:31, in no registered scope    ->    stage=1, in task layer1_fwd
P("experts") at moe.py:12    ->    no task maps `experts`
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from multimesh._src.frontend.matching import Matcher
from multimesh._src.frontend.registrations import Registration
from multimesh._src.frontend.scopes import iteration_of, scope_of_equation
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.constraint import UNCONSTRAINED, constraint_p
from multimesh._src.ir.flat import Equation, Step, all_equations
from multimesh._src.ir.program import Program
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import jaxprs
from multimesh._src.partition.pipeline import Origins
from multimesh._src.partition.seeds import Seeds
from multimesh._src.report.sites import Site, site_of


@dataclass(frozen=True, slots=True)
class CodeReport:
    """Code of one scope that no registration reaches, as far as it was placed alike.

    Attributes:
        scope: The scopes around it; empty where there are none.
        lines: The user's `file:line`s.
        submesh: The label of the submesh where it runs; empty where every task that reads what it
            makes computes it itself.
        tasks: Labels of the tasks that it became part of.
    """

    scope: str
    lines: tuple[str, ...]
    submesh: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegistrationReport:
    """One registered matcher.

    Attributes:
        matcher: The regular expression.
        where: The user's `file:line`.
        matched: The matched texts, in order of the program.
        missing: Numbers of layers that it is registered for and that no scope has.
        shadowed: Scopes that it touches but that another registration takes, or that its callback
            says are no tasks.
    """

    matcher: str
    where: str
    matched: tuple[str, ...]
    missing: tuple[int, ...]
    shadowed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeReport:
    """Control flow over several submeshes that runs whole on one of them.

    Attributes:
        primitive: `cond`, `while`, `scan` or another one with programs inside.
        site: Where it stands.
        submesh: The label of the submesh where it runs.
        inside: Labels of the submeshes of the tasks inside it.
    """

    primitive: str
    site: Site
    submesh: str
    inside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnmappedReport:
    """A name in sharding constraints that no task maps to a mesh axis: those dims stay open.

    Attributes:
        name: The logical axis.
        sites: Where it is named.
    """

    name: str
    sites: tuple[Site, ...]


def find_unmatched(
    program: Program, origins: Origins, matcher: Matcher, label_of: Mapping[int, str]
) -> tuple[CodeReport, ...]:
    """Returns the code in no registered scope by where it was placed, in order of the program.

    Args:
        program: The program.
        origins: Where it comes from.
        matcher: The registrations; autodiff's sums have scopes, but are seeds of none.
        label_of: Labels of the tasks by their indices.
    """
    found: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    registered: dict[Scope, bool] = {}
    for equation in all_equations(origins.flat.steps):
        serial, scope = equation.serial, equation.scope
        if scope not in registered:
            winner = matcher.registration_of(scope, iteration_of(scope))
            registered[scope] = winner is not None
        if serial in origins.match or registered[scope]:
            continue
        own = origins.task_of.get(serial)
        tasks = origins.clones.get(serial, ()) if own is None else (own,)
        if not tasks:
            continue
        submesh = "" if own is None else program.submeshes[origins.place[serial]].label
        site = site_of(equation)
        lines, labels = found.setdefault((site.scope, submesh), ({}, {}))
        lines[site.line] = None
        labels.update(dict.fromkeys(label_of[task] for task in tasks if task in label_of))
    return tuple(
        CodeReport(scope, tuple(filter(None, lines)), submesh, tuple(labels))
        for (scope, submesh), (lines, labels) in found.items()
    )


def find_whole(
    program: Program, origins: Origins, traced: TracedFunction
) -> tuple[WholeReport, ...]:
    """Returns the control flow over several submeshes that was not cut."""
    seeds = Seeds(traced.matcher)
    return tuple(
        WholeReport(
            equation.primitive,
            site_of(equation),
            program.submeshes[origins.place[equation.serial]].label,
            tuple(dict.fromkeys(m.label for m in seeds.inside(equation.eqn, equation.scope))),
        )
        for equation in all_equations(origins.flat.steps)
        if _is_whole(equation, origins, seeds)
    )


def _is_whole(equation: Equation, origins: Origins, seeds: Seeds) -> bool:
    if equation.serial not in origins.place or not jaxprs.sub_jaxprs(equation.eqn.params):
        return False
    return seeds.num_submeshes_inside(equation.eqn, equation.scope) > 1


def find_unmapped(program: Program, origins: Origins) -> tuple[UnmappedReport, ...]:
    """Returns the logical axes that no task of the function maps, in order of the program."""
    mapped = {axis for submesh in program.submeshes for axis in submesh.mesh.axis_names}
    mapped |= {logical for match in origins.match.values() for logical, _ in match.pairs}
    found: dict[str, dict[Site, None]] = {}
    for equation in all_equations(origins.flat.steps):
        for name in _logical_names(equation.eqn):
            if name not in mapped:
                found.setdefault(name, {})[site_of(equation)] = None
    return tuple(UnmappedReport(name, tuple(sites)) for name, sites in found.items())


def _logical_names(eqn: jaxprs.JaxprEqn) -> Iterator[str]:
    """The names in the logical constraints that an equation is or holds."""
    if eqn.primitive is constraint_p and eqn.params["kind"] == "logical":
        for dim in eqn.params["dims"]:
            yield from () if dim is UNCONSTRAINED else dim
    for jaxpr in jaxprs.sub_jaxprs(eqn.params):
        for inner in jaxprs.open_jaxpr(jaxpr).eqns:
            yield from _logical_names(inner)


# --- registrations -------------------------------------------------------------------------------


def report_registrations(
    traced: TracedFunction, steps: Sequence[Step]
) -> tuple[RegistrationReport, ...]:
    """Reports what every registration of the active contexts matched."""
    matcher = traced.matcher
    registrations = [r for level in matcher.levels for r in level.registrations]
    matched: dict[Registration, dict[str, None]] = {r: {} for r in registrations}
    shadowed: dict[Registration, dict[str, None]] = {r: {} for r in registrations}
    for scope in dict.fromkeys(_scopes(steps)):
        winner = matcher.registration_of(scope, iteration_of(scope))
        for registration in registrations:
            text = next(filter(None, map(registration.touch, _prefixes(scope.path))), None)
            if winner is not None and winner[0] is registration:
                matched[registration][winner[1]] = None
            elif text is not None:
                shadowed[registration][text] = None
    return tuple(
        RegistrationReport(
            matcher=r.matcher,
            where=r.where,
            matched=tuple(matched[r]),
            missing=r.missing_layers(matched[r]),
            shadowed=tuple(shadowed[r]),
        )
        for r in registrations
    )


def _prefixes(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (path[:length] for length in range(len(path), 0, -1))


def _scopes(steps: Sequence[Step]) -> Iterator[Scope]:
    """The scopes of all equations at any depth."""
    for equation in all_equations(tuple(steps)):
        yield equation.scope
        yield from _scopes_inside(equation.eqn, equation.scope)


def _scopes_inside(eqn: jaxprs.JaxprEqn, scope: Scope) -> Iterator[Scope]:
    for jaxpr in jaxprs.sub_jaxprs(eqn.params):
        for inner in jaxprs.open_jaxpr(jaxpr).eqns:
            joined = scope.join(scope_of_equation(inner))
            yield joined
            yield from _scopes_inside(inner, joined)
