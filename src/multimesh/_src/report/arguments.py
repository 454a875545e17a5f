"""What became of the arguments: where each lives, who reads it, and when it is moved.

state['params'][0]   stage=0   replicated      moved: first call   read by layer0_fwd, layer0_bwd
batch[0]             stage=0   P('data',)      moved: every call   in 4 microbatches
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.plan import Input, Plan
from multimesh._src.ir.program import EVERYWHERE, Program
from multimesh._src.report.traffic import num_bytes, type_text

Moved: TypeAlias = Literal["never", "first call", "every call", "unused"]
"""When an argument is moved, if calls are made with arguments that lie as when it was traced."""


@dataclass(frozen=True, slots=True)
class ArgumentReport:
    """One argument of the function.

    Attributes:
        name: The user's name, as `state['params'][0]`.
        type: Its type, as `float32[2,4]`.
        bytes: Its size, unsharded.
        home: The label of the submesh where it lives (its owner), or `everywhere`; empty if it is
            unused.
        layout: How it is sharded there, as `P('data', None)`, or `replicated`.
        came: Where it lay when the function was traced; empty for the host or any device.
        moved: When it is moved to its home.
        microbatches: Into how many it is stored cut; 0 if it is not.
        donated: Whether results may take its buffer.
        returned_as: Results that are this very array.
        used_by: Labels of the tasks that read it.
    """

    name: str
    type: str
    bytes: int
    home: str
    layout: str
    came: str
    moved: Moved
    microbatches: int
    donated: bool
    returned_as: tuple[str, ...]
    used_by: tuple[str, ...]


def report_arguments(
    traced: TracedFunction,
    program: Program,
    plan: Plan,
    reads: Sequence[tuple[str, Sequence[str]]],
) -> tuple[ArgumentReport, ...]:
    """Reports the arguments, in their order.

    Args:
        traced: The traced function.
        program: Where its values live.
        plan: Its plan.
        reads: The label of each task with the names of the arguments that it reads.
    """
    result_names: dict[int, list[str]] = {}
    for slot, result in zip(plan.outputs, traced.results, strict=True):
        result_names.setdefault(slot, []).append(result.name)
    used_by: dict[str, list[str]] = {}
    for label, names in reads:
        for name in names:
            used_by.setdefault(name, []).append(label)
    return tuple(
        ArgumentReport(
            name=entry.name,
            type=type_text(traced.arguments[entry.index].aval),
            bytes=num_bytes(traced.arguments[entry.index].aval),
            home=_home(program, plan, entry),
            layout=_layout_of(plan, entry),
            came=_came(traced, program, entry),
            moved=_moved(traced, plan, entry),
            microbatches=entry.microbatches,
            donated=entry.donated,
            returned_as=tuple(n for slot in entry.slots for n in result_names.get(slot, ())),
            used_by=tuple(used_by.get(entry.name, ())),
        )
        for entry in plan.inputs
    )


def _home(program: Program, plan: Plan, entry: Input) -> str:
    if not entry.slots:
        return ""
    home = program.home.get(program.arguments[entry.index])
    if home == EVERYWHERE:
        return "everywhere"
    if home is not None:
        return program.submeshes[home].label
    return _label(program, plan.slots[entry.slots[0]].sharding)


def _label(program: Program, sharding: NamedSharding) -> str:
    labels = (submesh.label for submesh in program.submeshes if submesh.mesh == sharding.mesh)
    return next(labels, "everywhere")


def _came(traced: TracedFunction, program: Program, entry: Input) -> str:
    placement = traced.arguments[entry.index].placement
    if placement is None:
        return ""
    return f"{_label(program, placement)}, {_layout(placement.spec)}"


def _layout_of(plan: Plan, entry: Input) -> str:
    """The layout of an argument; of a batch stored microbatch-major that of its rows."""
    if not entry.slots:
        return ""
    spec = plan.slots[entry.slots[0]].sharding.spec
    return _layout(PartitionSpec(*spec[1:]) if entry.microbatches else spec)


def _layout(spec: PartitionSpec) -> str:
    if not any(spec):
        return "replicated"
    return f"P({', '.join('None' if dim is None else repr(dim) for dim in spec)})"


def _moved(traced: TracedFunction, plan: Plan, entry: Input) -> Moved:
    if not entry.slots:
        return "unused"
    info = plan.slots[entry.slots[0]]
    placement = traced.arguments[entry.index].placement
    rank = len(info.aval.shape)
    same = placement is not None and placement.is_equivalent_to(info.sharding, rank)
    if same and not entry.microbatches:
        return "never"
    for slot, result in zip(plan.outputs, traced.results, strict=True):
        if result.successor_of == entry.index:
            returned: NamedSharding = plan.slots[slot].sharding
            return "first call" if returned.is_equivalent_to(info.sharding, rank) else "every call"
    return "every call"
