"""When each buffer of a plan is freed, and which executables may write over their arguments.

    plan                                      frees        donations
    run  grad  (%w %x0)     -> %g0
    run  grad  (%w %x1)     -> %g1            %x1 ...
    run  add   (%zero %g0)  -> %a0            %zero %g0    add: argument 0 -> result 0
    run  add   (%a0 %g1)    -> %a1            %a0 %g1
    return %a1

A slot is freed after the last step that reads it; slots that are returned never are. An executable
donates an argument if that is right for *all* its runs: the slot dies there, nothing that may share
its buffer lives on, the buffer is ours (not of a constant and not of an argument that the caller
did not donate), and a result of the same type and layout takes the buffer. A loop that adds into an
accumulator therefore works in place.

Slots that may share a buffer form an *alias group*: source and target of a copy that leaves shards
where they are, and all slots of one argument.

Where donation is right for most runs of an executable but not for some (an accumulator that starts
from an array of the caller), these runs get a private copy of the argument; where it is right for
half of them or fewer, it is given up. Private copies also keep results apart that would share a
buffer with a constant, an undonated argument or another result, and they are what a host loop gets
that may write over what it carries, unless that dies there. An argument that the plan returns as it
is stays the caller's own array.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import jax

from multimesh._src.ir.plan import Copy, Executable, HostLoop, Plan, Run, Slot, Step
from multimesh._src.ir.submesh import Submesh
from multimesh._src.jax_compat.avals import no_ambient_mesh
from multimesh._src.runtime.donation import Pairs, pair_donations, runs_of

Sharing: TypeAlias = Mapping[Copy, tuple[bool, ...]]

_NEVER = 1 << 60  # "step" after which a returned slot dies


@dataclass(frozen=True, slots=True)
class BufferedPlan:
    """A plan with the life of its buffers.

    Attributes:
        plan: The plan, with runs of copying executables added where private copies are needed.
        frees: Per step the slots that die there.
        donations: Per executable its donated arguments, in order, each with the result that takes
            its buffer.
        kept_inputs: Positions (in `plan.inputs`) of donated arguments that must not be deleted
            after the step, because a result is or may share their array.
    """

    plan: Plan
    frees: tuple[tuple[Slot, ...], ...]
    donations: tuple[Pairs, ...]
    kept_inputs: frozenset[int]


def plan_buffers(plan: Plan, shared: Sharing | None = None) -> BufferedPlan:
    """Plans frees and donations.

    Args:
        plan: The plan.
        shared: Per copy and value whether the target may share memory with its source. By default
            those do whose submeshes have a device in common.
    """
    if shared is None:
        shared = {step: _overlaps(plan, step) for step in plan.steps if isinstance(step, Copy)}
    plan = _own_carries(_separate_results(plan, shared), shared)
    lives = _lives(plan, shared)
    allowed = _allowed_donations(plan, lives)
    donations = pair_donations(plan, allowed)
    plan = _copy_for_donation(plan, donations, allowed)
    lives = _lives(plan, shared)
    donations += ((),) * (len(plan.executables) - len(donations))
    kept = _kept_inputs(plan, _lives(plan, shared, unrun=True))
    return BufferedPlan(plan, _frees(plan, lives), donations, kept)


# --- lives ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lives:
    last: tuple[int, ...]  # per slot the last step that makes or reads it; -1: no step does
    group: tuple[int, ...]  # per slot the number of its alias group
    group_last: Mapping[int, int]
    foreign: frozenset[int]  # groups with a constant or an argument that was not donated


def _lives(plan: Plan, shared: Sharing, *, unrun: bool = False) -> _Lives:
    """Finds the lives of all slots; `unrun` assumes that no host loop has an iteration."""
    last = [-1] * len(plan.slots)
    for index, step in enumerate(plan.steps):
        for slot in chain(reads(step), writes(step)):
            last[slot] = index
    for slot in plan.outputs:
        last[slot] = _NEVER
    group = _alias_groups(plan, shared, unrun)
    group_last: dict[int, int] = defaultdict(lambda: -1)
    for slot, number in enumerate(group):
        group_last[number] = max(group_last[number], last[slot])
    undonated = (slot for i in plan.inputs if not i.donated for slot in i.slots)
    constants = (constant.slot for constant in plan.constants)
    foreign = frozenset(group[slot] for slot in chain(undonated, constants))
    return _Lives(tuple(last), group, group_last, foreign)


def reads(step: Step) -> tuple[Slot, ...]:
    """Returns the slots that a step reads."""
    return step.sources if isinstance(step, Copy) else step.inputs


def writes(step: Step) -> tuple[Slot, ...]:
    """Returns the slots that a step fills."""
    return step.targets if isinstance(step, Copy) else step.outputs


def _alias_groups(plan: Plan, shared: Sharing, unrun: bool) -> tuple[int, ...]:
    parent = list(range(len(plan.slots)))

    def root(slot: Slot) -> Slot:
        while parent[slot] != slot:
            parent[slot] = slot = parent[parent[slot]]
        return slot

    for first, second in _sharing_slots(plan, shared, unrun):
        parent[root(second)] = root(first)
    return tuple(root(slot) for slot in range(len(plan.slots)))


def _sharing_slots(plan: Plan, shared: Sharing, unrun: bool) -> Iterator[tuple[Slot, Slot]]:
    """Yields pairs of slots that may share a buffer."""
    for entry in plan.inputs:
        yield from ((entry.slots[0], slot) for slot in entry.slots[1:])
    for step in plan.steps:
        if isinstance(step, Copy):
            flags = zip(step.sources, step.targets, shared[step], strict=True)
            yield from ((source, target) for source, target, shares in flags if shares)
        elif isinstance(step, HostLoop):
            if unrun:  # the results are what went in
                yield from zip(step.inputs, step.outputs, strict=False)
            # a carry that no iteration makes may be passed on for ever
            kept = [k for k, entry in enumerate(step.plan.inputs) if not entry.donated]
            results = [slot for k, slot in enumerate(step.outputs) if k in kept]
            yield from ((step.inputs[k], slot) for slot in results for k in kept)


def _overlaps(plan: Plan, step: Copy) -> tuple[bool, ...]:
    devices = lambda slot: plan.slots[slot].sharding.device_set  # noqa: E731
    return tuple(
        not devices(source).isdisjoint(devices(target))
        for source, target in zip(step.sources, step.targets, strict=True)
    )


def _frees(plan: Plan, lives: _Lives) -> tuple[tuple[Slot, ...], ...]:
    constants = {constant.slot for constant in plan.constants}
    return tuple(
        tuple(
            slot
            for slot in dict.fromkeys(chain(reads(step), writes(step)))
            if lives.last[slot] == index and slot not in constants
        )
        for index, step in enumerate(plan.steps)
    )


def _kept_inputs(plan: Plan, lives: _Lives) -> frozenset[int]:
    return frozenset(
        position
        for position, entry in enumerate(plan.inputs)
        if entry.donated and any(lives.group_last[lives.group[s]] == _NEVER for s in entry.slots)
    )


# --- donation ------------------------------------------------------------------------------------

Allowed: TypeAlias = Mapping[tuple[int, int], frozenset[int]]


def _allowed_donations(plan: Plan, lives: _Lives) -> Allowed:
    """Returns, per (executable, argument), the steps that may donate it, if they are a majority."""
    steps: dict[tuple[int, int], set[int]] = defaultdict(set)
    num_runs: dict[int, int] = defaultdict(int)
    for index, run in runs_of(plan):
        num_runs[run.executable] += 1
        groups = [lives.group[slot] for slot in run.inputs]
        uses = Counter(groups)
        for argument, group in enumerate(groups):
            dies = lives.group_last[group] == index and uses[group] == 1
            if dies and group not in lives.foreign:
                steps[run.executable, argument].add(index)
    return {
        key: frozenset(found) for key, found in steps.items() if 2 * len(found) > num_runs[key[0]]
    }


# --- private copies ------------------------------------------------------------------------------


class _Rewriter:
    """Adds slots and copying executables to a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.slots = list(plan.slots)
        self.executables = list(plan.executables)
        self._copiers: dict[Any, int] = {}

    def copy(self, slot: Slot) -> Run:
        """Returns a run that copies `slot` into a new slot."""
        info = self.slots[slot]
        self.slots.append(replace(info, label=f"copy of {info.label}"))
        key = (info.aval.shape, info.aval.dtype, info.aval.weak_type, info.sharding)
        if key not in self._copiers:
            self._copiers[key] = len(self.executables)
            self.executables.append(_copier(info.aval, info.sharding))
        return Run(self._copiers[key], (slot,), (len(self.slots) - 1,), f"copy of {info.label}", -1)

    def finish(self, steps: Sequence[Step], outputs: tuple[Slot, ...]) -> Plan:
        return replace(
            self.plan,
            slots=tuple(self.slots),
            executables=tuple(self.executables),
            steps=tuple(steps),
            outputs=outputs,
        )


def _copier(aval: Any, sharding: Any) -> Executable:
    with no_ambient_mesh():
        abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        body = jax.make_jaxpr(jax.numpy.copy)(abstract)
    submesh = Submesh(-1, "", sharding.mesh)
    return Executable("copy", body, submesh, (sharding.spec,), (sharding.spec,))


def _separate_results(plan: Plan, shared: Sharing) -> Plan:
    """Appends private copies for results that share a buffer with something that lives on."""
    lives = _lives(plan, shared)
    arguments = {slot for entry in plan.inputs for slot in entry.slots}
    taken = {lives.group[slot] for slot in plan.outputs if slot in arguments}
    rewriter, copies, renamed = _Rewriter(plan), [], {}
    for slot in dict.fromkeys(plan.outputs):
        group = lives.group[slot]
        if slot not in arguments and (group in lives.foreign or group in taken):
            copies.append(rewriter.copy(slot))
            renamed[slot] = copies[-1].outputs[0]
        taken.add(group)
    if not copies:
        return plan
    outputs = tuple(renamed.get(slot, slot) for slot in plan.outputs)
    return rewriter.finish((*plan.steps, *copies), outputs)


def _own_carries(plan: Plan, shared: Sharing) -> Plan:
    """Puts private copies before loops that would write over an array that is not theirs."""
    if not any(isinstance(step, HostLoop) for step in plan.steps):
        return plan
    lives = _lives(plan, shared)
    rewriter, steps = _Rewriter(plan), []
    for index, step in enumerate(plan.steps):
        if isinstance(step, HostLoop):
            inputs = list(step.inputs)
            uses = Counter(lives.group[slot] for slot in inputs)
            for position, entry in enumerate(step.plan.inputs):
                group = lives.group[inputs[position]]
                dies = lives.group_last[group] == index and uses[group] == 1
                if entry.donated and not (dies and group not in lives.foreign):
                    copy = rewriter.copy(inputs[position])
                    steps.append(copy)
                    inputs[position] = copy.outputs[0]
            step = replace(step, inputs=tuple(inputs))
        steps.append(step)
    return rewriter.finish(steps, plan.outputs)


def _copy_for_donation(plan: Plan, donations: Sequence[Pairs], allowed: Allowed) -> Plan:
    """Puts private copies before the runs that may not donate what their executable donates."""
    rewriter, steps = _Rewriter(plan), []
    for index, step in enumerate(plan.steps):
        if isinstance(step, Run):
            inputs = list(step.inputs)
            for argument, _ in donations[step.executable]:
                if index not in allowed[step.executable, argument]:
                    copy = rewriter.copy(inputs[argument])
                    steps.append(copy)
                    inputs[argument] = copy.outputs[0]
            step = replace(step, inputs=tuple(inputs))
        steps.append(step)
    return rewriter.finish(steps, plan.outputs)
