"""Gives every placed equation its task group.

A seed's group is (task name, transposes, submesh) (R4). Any other equation joins, on its
submesh and in its phase, the group of its operand that is made last, else that of its first user,
else the group `main`. Outside loops, what runs after the backward pass (clip, optimizer, metrics)
is further told apart by how many hops between submeshes still lie ahead of it: a total that other
submeshes wait for never shares a task with the update that needs it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from multimesh._src.frontend.matching import Match
from multimesh._src.ir.flat import Equation, Loop
from multimesh._src.partition.split.regions import Region


@dataclass(frozen=True, slots=True)
class Group:
    """Equations of equal groups share tasks where that makes no cycle."""

    name: str
    transposes: int
    submesh: int
    backward: bool
    hops: int = 0
    stage: int | None = None
    suffixes: tuple[str, str] = ("", "")
    pairs: tuple[tuple[str, str], ...] | None = None  # logical axes; None: each mesh axis itself


def group_equations(
    region: Region,
    place: Mapping[int, int],
    seed: Mapping[int, Match],
    in_loop: bool,
    backward_name: Callable[[str], str],
) -> dict[int, Group]:
    """Gives the group of every equation of a region, by position.

    Args:
        region: Steps that belong to tasks.
        place: Submesh of each equation, by serial.
        seed: Match of each seed, by serial.
        in_loop: Whether the region is a loop body.
        backward_name: Gives the name of the backward task of a forward task's name.
    """
    backward = backward_phase(region)
    hops = [0] * len(region.steps) if in_loop else _hops_ahead(region, place)
    groups: dict[int, Group] = {}
    for position, step in enumerate(region.steps):
        if isinstance(step, Loop):
            continue
        match = seed.get(step.serial)
        here = place[step.serial]
        if match is not None:
            phase = backward[position]
            groups[position] = Group(
                match.name,
                max(step.scope.transposes, phase),
                here,
                phase,
                stage=match.stage,
                suffixes=match.task.split_backprop or ("", ""),
                pairs=match.pairs,
            )
            continue
        joined = _latest_operand(position, region, groups, here, backward[position])
        if joined is not None:
            late = backward[position] and step.scope.transposes == 0
            groups[position] = replace(joined, hops=hops[position] if late else joined.hops)
    _join_users(region, place, groups, backward, hops, backward_name)
    return groups


def backward_phase(region: Region) -> list[bool]:
    """Whether an equation is, or depends on, a transposed one."""
    phase: list[bool] = []
    for position, step in enumerate(region.steps):
        own = isinstance(step, Equation) and step.scope.transposes > 0
        phase.append(own or any(phase[operand] for operand in region.operands[position]))
    return phase


def _hops_ahead(region: Region, place: Mapping[int, int]) -> list[int]:
    """The largest number of changes of submesh between a step and the end."""
    hops = [0] * len(region.steps)
    for position in reversed(range(len(region.steps))):
        here = _place_of(region, position, place)
        for user in region.users[position]:
            there = _place_of(region, user, place)
            hops[position] = max(hops[position], hops[user] + (here != there))
    return hops


def _place_of(region: Region, position: int, place: Mapping[int, int]) -> int:
    step = region.steps[position]
    return -2 if isinstance(step, Loop) else place[step.serial]


def _latest_operand(
    position: int, region: Region, groups: Mapping[int, Group], here: int, backward: bool
) -> Group | None:
    for operand in sorted(region.operands[position], reverse=True):
        group = groups.get(operand)
        if group is not None and group.submesh == here and group.backward == backward:
            return group
    return None


def _join_users(
    region: Region,
    place: Mapping[int, int],
    groups: dict[int, Group],
    backward: list[bool],
    hops: list[int],
    backward_name: Callable[[str], str],
) -> None:
    """Groups what has no operand to join: by its first user, else by name, from the end upward."""
    for position in reversed(range(len(region.steps))):
        step = region.steps[position]
        if isinstance(step, Loop) or position in groups:
            continue
        here, phase = place[step.serial], backward[position]
        users = [groups[user] for user in sorted(region.users[position]) if user in groups]
        users = [group for group in users if group.submesh == here and group.backward == phase]
        if users:
            groups[position] = replace(users[0], hops=max(users[0].hops, hops[position]))
            continue
        groups[position] = _fallback(
            position, region, groups, here, phase, hops[position], backward_name
        )


def _fallback(
    position: int,
    region: Region,
    groups: Mapping[int, Group],
    here: int,
    phase: bool,
    hops: int,
    backward_name: Callable[[str], str],
) -> Group:
    for operand in sorted(region.operands[position], reverse=True):
        group = groups.get(operand)
        if group is not None and group.submesh == here and phase and not group.backward:
            return replace(group, name=backward_name(group.name), transposes=1, backward=True)
    return Group("main", int(phase), here, phase, hops)
