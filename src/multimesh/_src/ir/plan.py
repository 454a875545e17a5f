"""The plan: one flat list of steps over numbered slots, ready to be compiled and run.

A *slot* holds one array with a known sharding for some part of a step call. The plan is what the
partitioner hands to the runtime: everything about names, trees and schedules is already resolved.
Nothing here says when a slot is freed or donated: `runtime.buffers` adds that.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multimesh._src.ir.submesh import Submesh

Slot: TypeAlias = int


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """Type and place of the array in a slot.

    `var` is the variable of the program that it holds; -1 for literals and loop indices.
    """

    aval: Any  # jax.core.ShapedArray: shape, dtype, weak_type
    sharding: NamedSharding
    label: str  # where the value comes from, for reports and errors
    var: int = -1


@dataclass(frozen=True, slots=True)
class Executable:
    """One program to compile: a body on one submesh with the layout of its arguments and results.

    Equal `body` objects (by identity) with equal specs and the same submesh are one executable.
    `parts` has the numbers of the executables that were fused into it, in order.
    """

    name: str  # becomes the name of the compiled module
    body: ClosedJaxpr  # no consts; constraint equations are abstract (see `ir.body`)
    submesh: Submesh
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Runs an executable.

    `iteration` is -1 outside loops. Runs of one `group` follow each other at once in every
    iteration and may be fused; -1 says that a run is in none.
    """

    executable: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    task: str
    iteration: int
    group: int = -1


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies values along one edge: `targets[i]` holds `sources[i]` in the target's sharding.

    Source and target shardings may name other devices, other device counts or other layouts.
    """

    sources: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    edge: str


@dataclass(frozen=True, slots=True)
class HostLoop:
    """Runs a plan again and again, as long as a value says so that the host reads (R12).

    The plan takes what the loop carries and then what it only reads, and gives what is carried on:
    `inputs` has one slot per input of the plan, `outputs` one per output. `condition` is the
    position of the value read. Carried inputs that the plan says are donated belong to the loop.
    """

    plan: "Plan"
    condition: int
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    name: str


Step: TypeAlias = Run | Copy | HostLoop


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a stack `[L, ...]`, which the caller holds as one array (R7).

    The array is the `index`-th flat argument or result; its first dim is cut into `count` equal
    parts over axis `axis` of `mesh`, and this is part `number`.
    """

    index: int
    number: int
    count: int
    mesh: Mesh
    axis: str

    @property
    def devices(self) -> frozenset[Any]:
        """The devices of this part: those of its rows in the whole array."""
        size = self.mesh.shape[self.axis] // self.count
        at = self.mesh.axis_names.index(self.axis)
        positions = range(self.number * size, (self.number + 1) * size)
        return frozenset(self.mesh.devices.take(positions, axis=at).flat)

    def whole_sharding(self, sharding: NamedSharding) -> NamedSharding:
        """The sharding of the whole array whose parts have `sharding`."""
        first, *rest = cast(tuple[Any, ...], tuple(sharding.spec) or (None,))
        inside: tuple[Any, ...] = () if first is None else (first,)
        if isinstance(first, tuple):
            inside = cast(tuple[Any, ...], first)
        spec = PartitionSpec((self.axis, *inside) if inside else self.axis, *rest)
        return NamedSharding(self.mesh, spec, memory_kind=sharding.memory_kind)


@dataclass(frozen=True, slots=True)
class Input:
    """A flat argument of the step, a block or another form of one: the slots that it fills.

    `slots` has one entry per sharding in which the argument itself is wanted at call time (usually
    one). `microbatches` > 0 says that the array is wanted microbatch-major: `[B, ...]` cut along
    dim `dim` is stored as `[microbatches, ..., B / microbatches, ...]`: a new dim in front, and the
    rows of one microbatch where the cut dim was.
    An unused argument has no slots. `block` says that it is a part of the `argument`-th one.
    Entries without blocks for one argument are its forms: whole, and cut in one way or another.
    """

    index: int  # position in the plan's inputs
    argument: int  # position among the caller's flat arguments
    name: str  # the user's name, as `state['params'][0]`
    slots: tuple[Slot, ...]
    donated: bool
    microbatches: int = 0
    dim: int = 0
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Constant:
    """A closed-over array or an index, placed once when the plan is compiled."""

    value: Any
    slot: Slot


@dataclass(frozen=True, slots=True)
class Plan:
    """All that one call does. `outputs[i]` is the slot of the i-th flat result.

    Where results are held in blocks, `outputs` lists the blocks in their place, and `output_blocks`
    says for every output which block it is, if it is one; it is empty where there are none.

    `outputs` may name one slot twice, or the slot of an input: the runtime returns the same array
    (for an input: the caller's own array where it already lay in place).
    """

    slots: tuple[SlotInfo, ...]
    inputs: tuple[Input, ...]
    constants: tuple[Constant, ...]
    executables: tuple[Executable, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Slot, ...]
    output_blocks: tuple[Block | None, ...] = ()
