"""Does anything in a traced function say where it runs? Decides what is plain JAX (R15)."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from multimesh._src.errors import message
from multimesh._src.frontend.markers import microbatch_marker
from multimesh._src.frontend.scopes import scope_of
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.constraint import constraint_p
from multimesh._src.ir.scope import Scope
from multimesh._src.jax_compat import jaxprs, shard_maps
from multimesh._src.topology import devices_label

MAX_SCOPES = 12
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Findings:
    """What a traced function says of places.

    Attributes:
        matched: Some scope is a task, or some value is placed by hand.
        constrained: Some value has a logical or mesh sharding.
        scheduled: Some microbatch loop names a schedule.
        scopes: The distinct paths of scopes, complete only if nothing matched.
        device_sets: Where placed arguments lie and wanted results shall lie.
    """

    matched: bool
    constrained: bool
    scheduled: bool
    scopes: tuple[str, ...]
    device_sets: frozenset[frozenset[Any]]


def findings(traced: TracedFunction) -> Findings:
    """Looks through a traced function, only as far as the first match."""
    scopes: dict[Scope, None] = {}
    matched = constrained = scheduled = False
    for eqn, scope in _walk(traced.jaxpr, traced.ambient):
        is_new = scope not in scopes
        scopes[scope] = None
        constrained = constrained or eqn.primitive is constraint_p
        scheduled = scheduled or (is_new and _names_a_schedule(scope))
        if (is_new and _matches(traced, scope)) or _places(eqn):
            matched = True
            break
    paths = dict.fromkeys(str(scope) for scope in scopes if scope.path)
    return Findings(matched, constrained, scheduled, tuple(paths), _device_sets(traced))


def _matches(traced: TracedFunction, scope: Scope) -> bool:
    """Whether a scope is a task, if need be in the first iteration of the loop around it."""
    found = (traced.matcher.of_scope(scope, iteration) for iteration in (None, 0))
    return any(match is not None for match in found)


def _names_a_schedule(scope: Scope) -> bool:
    loops = (microbatch_marker(marker) for marker in scope.markers)
    return any(
        loop is not None and (loop.schedule is not None or loop.custom_schedule is not None)
        for loop in loops
    )


def _walk(jaxpr: jaxprs.AnyJaxpr, outer: Scope) -> Iterator[tuple[jaxprs.JaxprEqn, Scope]]:
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        scope = outer.join(scope_of(eqn.source_info.name_stack))
        yield eqn, scope
        for inner in jaxprs.sub_jaxprs(eqn.params):
            yield from _walk(inner, scope)


def _places(eqn: jaxprs.JaxprEqn) -> bool:
    """Whether an equation puts its value on a mesh named in the program."""
    if shard_maps.is_shard_map(eqn):
        return True
    return eqn.primitive is constraint_p and eqn.params["mesh"] is not None


def _device_sets(traced: TracedFunction) -> frozenset[frozenset[Any]]:
    placements = [a.placement for a in traced.arguments] + [r.sharding for r in traced.results]
    return frozenset(frozenset(p.device_set) for p in placements if p is not None)


def is_plain(traced: TracedFunction, found: Findings, placed: set[frozenset[Any]]) -> bool:
    """Whether a function is plain JAX: nothing says where, and all lies on one device set (R15).

    Args:
        traced: The function.
        found: What it says of places.
        placed: The device sets of committed arguments.
    """
    if found.matched or (found.constrained and traced.global_mesh is not None):
        return False
    if len(found.device_sets | placed) > 1:
        return False
    return traced.settings.enable_fast_path or traced.global_mesh is None


def no_matcher_warning(name: str) -> str:
    """Returns the text of the warning that a schedule was named where nothing is registered."""
    return message(
        f"`{name}` has a microbatch loop with a schedule, but no task is registered here: it "
        "runs as plain JAX, on one set of devices.",
        ways=(
            "make or call it inside `with multi_mesh:`, and register the scopes that are tasks.",
            "leave `schedule` out where that is meant.",
        ),
    )


def no_match_warning(name: str, matchers: tuple[str, ...], scopes: tuple[str, ...]) -> str:
    """Returns the text of the warning that no task matched."""
    shown = ", ".join(f"`{scope}`" for scope in scopes[:MAX_SCOPES]) or "none"
    more = f" and {len(scopes) - MAX_SCOPES} more" if len(scopes) > MAX_SCOPES else ""
    registered = ", ".join(f"`{matcher}`" for matcher in matchers[:MAX_SCOPES])
    return message(
        f"no task matched in `{name}`.",
        window=f"scopes in the program: {shown}{more}\nregistered matchers: {registered}",
        ways=(
            "open the scope: `with jax.named_scope(...)` around the code of the task.",
            "register a matcher that touches one of the scopes.",
        ),
    )


def why_plain(name: str, matchers: tuple[str, ...], found: Findings, *, ignored: bool) -> str:
    """Returns what `explain()` says of a function that is plain JAX, and why it is."""
    shown = ", ".join(f"`{matcher}`" for matcher in matchers[:MAX_SCOPES])
    scopes = ", ".join(f"`{scope}`" for scope in found.scopes[:MAX_SCOPES]) or "none"
    if ignored:
        why, ways = "`ignore_transforms` is set.", ("leave out `ignore_transforms`.",)
    elif not matchers:
        why = "no task is registered where it was made or is called."
        ways = ("make or call it inside `with multi_mesh:`, and register the scopes of tasks.",)
    else:
        why = f"no scope of it matched a matcher. Registered: {shown}. Scopes: {scopes}."
        ways = ("open one of the scopes, or register a matcher that touches one.",)
    places = "" if ignored else " All its arguments lie on one set of devices, where it runs."
    text = f"`{name}` has no tasks and is plain JAX: {why}{places}"
    return message(textwrap.fill(text, WIDTH), ways=ways)


def why_pieces(traced: TracedFunction) -> str:
    """Returns what `explain()` says of a function that is cut by the places of its results."""
    groups: dict[str, list[str]] = {}
    for result in traced.results:
        mesh: Any = None if result.sharding is None else result.sharding.mesh
        devices = "anywhere" if mesh is None else devices_label(list(mesh.devices.flat))
        groups.setdefault(devices, []).append(result.name)
    lines = [
        f"{devices}: {len(names)} of {len(traced.results)} results, from `{names[0]}` on"
        for devices, names in groups.items()
    ]
    text = (
        f"`{traced.name}` has no tasks: the places of its results say where it runs. One program "
        "for each device set makes what lies there; what several need, each computes."
    )
    return message(textwrap.fill(text, WIDTH), window="\n".join(lines))
