"""Gives every placed equation its task group.

A seed's group is (task name, transposes, submesh) (R4). Any other equation joins, on its
submesh and in its phase, the group of its operand that is made last, else that of its users' groups
that ends first, else the group `main`; never a group of a given stage that it comes after, or, in
the forward pass, that a stage that needs it comes before.

Outside loops, what runs after the backward pass (clip, optimizer, metrics) is further told apart by
how many hops between submeshes still lie ahead of it: a total that other submeshes wait for never
shares a task with the update that needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    keys: frozenset[int],
    in_loop: bool,
    backward_name: Callable[[str], str],
) -> dict[int, Group]:
    """Gives the group of every equation of a region, by position.

    Args:
        region: Steps that belong to tasks.
        place: Submesh of each equation, by serial.
        seed: Match of each seed, by serial.
        keys: Serials of the equations that make random keys for several tasks: a group apart.
        in_loop: Whether the region is a loop body.
        backward_name: Gives the name of the backward task of a forward task's name.
    """
    backward = backward_phase(region)
    hops = [0] * len(region.steps) if in_loop else _hops_ahead(region, place)
    once = all(s.scope.transposes < 2 for s in region.steps if isinstance(s, Equation))
    grouper = _Grouper(region, place, backward, hops, once, backward_name)
    for position, step in enumerate(region.steps):
        if isinstance(step, Equation):
            match = seed.get(step.serial)
            if match is not None:
                grouper.seed(position, step, match)
            elif step.serial in keys:
                phase, here = backward[position], place[step.serial]
                grouper.groups[position] = Group("keys", int(phase), here, phase)
            else:
                grouper.join_operand(position)
        grouper.note_stage(position)
    grouper.note_stages_ahead()
    grouper.join_others()
    return grouper.groups


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


@dataclass(frozen=True, slots=True)
class _Grouper:
    """The groups of a region in the making, by position."""

    region: Region
    place: Mapping[int, int]
    backward: Sequence[bool]
    hops: Sequence[int]
    once: bool  # whether the backward pass goes through the stages only once
    backward_name: Callable[[str], str]
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    ends: dict[tuple[str, int, int], int] = field(default_factory=dict)  # the last seeds
    stages: dict[int, int] = field(default_factory=dict)  # the last given stage up to a step
    ahead: dict[int, int] = field(default_factory=dict)  # the first given stage that needs a step

    def seed(self, position: int, step: Equation, match: Match) -> None:
        """Gives a seed the group of its match."""
        phase = self.backward[position]
        self.groups[position] = Group(
            match.name,
            max(step.scope.transposes, phase),
            self.place[step.serial],
            phase,
            stage=match.stage,
            suffixes=match.task.split_backprop or ("", ""),
            pairs=match.pairs,
        )
        self.ends[_key(self.groups[position])] = position

    def note_stage(self, position: int) -> None:
        """Notes the last given stage, in the order of its phase, that a step needs or is in."""
        group = self.groups.get(position)
        own = () if group is None or group.stage is None else (group.stage,)
        stages = (*own, *self._stages_before(position))
        if stages and not self.backward[position]:
            self.stages[position] = max(stages)
        elif stages and self.once:
            self.stages[position] = min(stages)

    def note_stages_ahead(self) -> None:
        """Notes the first given stage of the forward pass that is or needs each step."""
        for position in reversed(range(len(self.region.steps))):
            group = self.groups.get(position)
            own = () if group is None or group.stage is None else (group.stage,)
            users = (self.ahead[u] for u in self.region.users[position] if u in self.ahead)
            if not self.backward[position] and (stages := (*own, *users)):
                self.ahead[position] = min(stages)

    def _stages_before(self, position: int) -> tuple[int, ...]:
        phase = self.backward[position]
        operands = (o for o in self.region.operands[position] if self.backward[o] == phase)
        return tuple(self.stages[operand] for operand in operands if operand in self.stages)

    def join_operand(self, position: int) -> bool:
        """Puts an equation in the group of its operand that is made last, if there is one."""
        step = self.region.steps[position]
        for operand in sorted(self.region.operands[position], reverse=True):
            group = self.groups.get(operand)
            if group is not None and self._fits(group, position):
                late = group.backward and isinstance(step, Equation) and not step.scope.transposes
                hops = self.hops[position] if late else group.hops
                self.groups[position] = replace(group, hops=hops)
                return True
        return False

    def join_user(self, position: int) -> bool:
        """Puts an equation in the group of a user, the one that ends first, if there is one.

        The first user itself may be a value's way to a group that runs much later; and where a
        whole model is recomputed, backward tasks begin in the order of the layers.
        """
        found = [
            (self.ends.get(_key(group), user), user, group)
            for user in self.region.users[position]
            if (group := self.groups.get(user)) is not None and self._fits(group, position)
        ]
        if not found:
            return False
        _, _, group = min(found, key=lambda entry: entry[:2])
        self.groups[position] = replace(group, hops=max(group.hops, self.hops[position]))
        return True

    def join_others(self) -> None:
        """Groups what has no operand to join: by users, then by operands that joined users."""
        steps = enumerate(self.region.steps)
        rest = [p for p, step in steps if isinstance(step, Equation) and p not in self.groups]
        joined = True
        while joined:
            left = [p for p in reversed(rest) if not self.join_user(p)]
            left = [p for p in reversed(left) if not self.join_operand(p)]
            joined = len(left) < len(rest)
            rest = left
        for position in reversed(rest):  # from the end upward, so that users come first
            if not self.join_user(position):
                self.groups[position] = self._by_name(position)

    def _by_name(self, position: int) -> Group:
        here, phase = self._place(position), self.backward[position]
        for operand in sorted(self.region.operands[position], reverse=True):
            group = self.groups.get(operand)
            if group is not None and group.submesh == here and phase and not group.backward:
                name = self.backward_name(group.name)
                return replace(group, name=name, transposes=1, backward=True)
        return Group("main", int(phase), here, phase, self.hops[position])

    def _fits(self, group: Group, position: int) -> bool:
        same_phase = group.backward == self.backward[position]
        if not same_phase or group.submesh != self._place(position):
            return False
        if group.stage is None:
            return True
        before = self._stages_before(position)
        if group.backward:
            return min(before, default=group.stage) >= group.stage
        return (
            max(before, default=group.stage) <= group.stage <= self.ahead.get(position, group.stage)
        )

    def _place(self, position: int) -> int:
        return _place_of(self.region, position, self.place)


def _key(group: Group) -> tuple[str, int, int]:
    return group.name, group.transposes, group.submesh
