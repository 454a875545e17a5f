"""What crosses from submesh to submesh in one call, value by value, and why.

Microbatches and copies to the same readers are summed up:

run  layer1_fwd[0] -> s11                     value  layer1_fwd output 0
copy stage=0 -> stage=1: s11 => s13           from   layer1_fwd  to  layer2_fwd, layer2_bwd
run  layer2_fwd[0]  s13 ...             ->    edge   stage=0 -> stage=1
(and so for microbatches 1, 2, 3)             copies 4, bytes 128, a value
                                              made in layer1 (model.py:9), read in layer2
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from jax.sharding import Sharding

from multimesh._src.ir.plan import Copy, Plan, Run, Slot
from multimesh._src.ir.submesh import Submesh
from multimesh._src.report.labels import Units
from multimesh._src.report.sites import Site, Sites

Why: TypeAlias = Literal[
    "argument", "constant", "value", "gradient", "saved", "carried", "result", "layout", "view"
]
"""Why a value is copied:

- `argument`, `constant`: it lives on another submesh than this reader.
- `value`, `gradient`: it is made on one submesh and read on another; in the backward pass.
- `saved`: it is made in the forward pass and read in a backward pass elsewhere.
- `carried`: a loop carries it, as the sum of its iterations or to the next one.
- `result`: it is wanted elsewhere as a result of the function.
- `layout`: the same devices want it in another layout.
- `view`: all of it lies there already; nothing is moved.
"""


@dataclass(frozen=True, slots=True)
class Reshard:
    """One value that is copied to another submesh or layout in every call.

    Attributes:
        value: The user's name of an argument, or which output of which task.
        type: Its type, as `float32[2,4]`.
        source: The task that makes it, or `argument` or `constant`.
        target: The tasks that read the copy and the results that it becomes, with commas.
        edge: Source and target submesh, as `stage=0 -> stage=1`.
        copies: Copies in one call.
        bytes: Bytes that the target devices lack and get in one call; replicas count each. 0 where
            all that is wanted is there already.
        why: Why it is copied, see `Why`.
        made: Where the user's program makes it; None for arguments and constants.
        used: Where it is first read on the target submesh; None where only results want it.
        conditional: Whether a branch makes it that may not be taken: zeros cross then.
    """

    value: str
    type: str
    source: str
    target: str
    edge: str
    copies: int
    bytes: int
    why: Why
    made: Site | None
    used: Site | None
    conditional: bool


@dataclass(frozen=True, slots=True)
class _Origin:
    value: str
    source: str


def find_reshards(
    plan: Plan,
    units: Units,
    result_names: tuple[str, ...],
    sites: Sites,
    submeshes: Sequence[Submesh],
) -> tuple[Reshard, ...]:
    """Returns the reshards of one call, in order of their first copy.

    Args:
        plan: The plan.
        units: What it runs.
        result_names: The user's names of the results, as `result[0]`.
        sites: Where values are made and read.
        submeshes: The submeshes of the program.
    """
    origins = dict(_origins(plan, units))
    readers = _readers(plan, units, result_names)
    numbers: dict[Any, int] = {s.mesh: s.index for s in submeshes if not s.rotation}
    found: dict[Reshard, list[int]] = {}
    sizes: dict[Any, int] = {}
    for step in plan.steps:
        if not isinstance(step, Copy):
            continue
        for source, target in zip(step.sources, step.targets, strict=True):
            origin, info, goal = origins[source], plan.slots[source], plan.slots[target]
            where = (info.aval.shape, info.aval.dtype, info.sharding, goal.sharding)
            if where not in sizes:
                sizes[where] = missing_bytes(info.aval, info.sharding, goal.sharding)
            place = numbers.get(goal.sharding.mesh, -1)
            is_made = origin.source not in ("argument", "constant")
            key = Reshard(
                value=origin.value,
                type=type_text(info.aval),
                source=origin.source,
                target=", ".join(readers[target]),
                edge=step.edge,
                copies=0,
                bytes=0,
                why="view",
                made=sites.made_at(info.var) if is_made else None,
                used=sites.used_at(info.var, place),
                conditional=is_made and sites.is_conditional(info.var),
            )
            if sizes[where]:
                same = info.sharding.device_set == goal.sharding.device_set
                carried = sites.is_carried(info.var)
                key = replace(key, why="layout" if same else _why(key, carried=carried))
            total = found.setdefault(key, [0, 0])
            total[0] += 1
            total[1] += sizes[where]
            origins[target] = origin
    return tuple(
        replace(reshard, copies=copies, bytes=size) for reshard, (copies, size) in found.items()
    )


def _why(reshard: Reshard, *, carried: bool) -> Why:
    if reshard.source in ("argument", "constant"):
        return "argument" if reshard.source == "argument" else "constant"
    if reshard.used is None:
        return "result"
    if reshard.made is not None and reshard.made.backward:
        return "gradient"
    if carried:
        return "carried"
    return "saved" if reshard.used.backward else "value"


def _origins(plan: Plan, units: Units) -> Iterator[tuple[Slot, _Origin]]:
    for entry in plan.inputs:
        yield from ((slot, _Origin(entry.name, "argument")) for slot in entry.slots)
    for constant in plan.constants:
        label = plan.slots[constant.slot].label
        yield constant.slot, _Origin(label, "constant")
    for number in units.unit_of:
        step, task = plan.steps[number], units.label_of(number)
        assert isinstance(step, Run)
        for k, slot in enumerate(step.outputs):
            yield slot, _Origin(f"{task} output {k}", task)


def _readers(
    plan: Plan, units: Units, result_names: tuple[str, ...]
) -> Mapping[Slot, tuple[str, ...]]:
    """Returns who reads each slot, also by way of further copies: tasks, then results."""
    readers: dict[Slot, dict[str, None]] = defaultdict(dict)
    for slot, name in zip(plan.outputs, result_names, strict=True):
        readers[slot][name] = None
    for number in reversed(range(len(plan.steps))):
        step = plan.steps[number]
        if isinstance(step, Run):
            name = units.label_of(number)
            for slot in step.inputs:
                readers[slot] = {name: None} | readers[slot]
        elif isinstance(step, Copy):
            for source, target in zip(step.sources, step.targets, strict=True):
                readers[source] = readers[target] | readers[source]
    return defaultdict(tuple, {slot: tuple(names) for slot, names in readers.items()})


def missing_bytes(aval: Any, source: Sharding, target: Sharding) -> int:
    """Returns the bytes of `target`'s shards that its devices do not hold of `source`'s."""
    shape = aval.shape
    held = source.devices_indices_map(shape)
    elements = 0
    for device, index in target.devices_indices_map(shape).items():
        elements += _overlap(index, index, shape)
        if device in held:
            elements -= _overlap(index, held[device], shape)
    return elements * aval.dtype.itemsize


def _overlap(one: Any, other: Any, shape: tuple[int, ...]) -> int:
    """Number of elements that lie in both of two boxes."""
    sizes = []
    for a, b, size in zip(one, other, shape, strict=True):
        (start, stop, _), (begin, end, _) = a.indices(size), b.indices(size)
        sizes.append(max(0, min(stop, end) - max(start, begin)))
    return math.prod(sizes)


def type_text(aval: Any) -> str:
    """Returns a type as `float32[2,4]`."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def num_bytes(aval: Any) -> int:
    """Returns the bytes of a whole array."""
    return int(aval.size * aval.dtype.itemsize)
