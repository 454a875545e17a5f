"""Which compiled form of a function a call takes.

A call is first looked up by its key: the treedef of the arguments, the static ones, the contexts
(R18) and JAX's own settings. Under a key lie *variants*. They differ in where arguments lie:

    call 1  step(host state, batch)      -> variant 1: state['w0'] on stage=0 as P('data'), ...
    call 2  step(state on its stages)    -> variant 1: every spec and submesh is the recorded one
    call 3  step(state on other stages)  -> variant 1 if matches decided the stages (it is moved),
                                            else variant 2

The usual call repeats an earlier one: `Signature` compares types and shardings of all leaves by
identity first, in two list comparisons, and nothing else is done.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from multimesh._src.frontend.tracing import TracedFunction, memory_of, placement_of, plain_aval
from multimesh._src.ir.plan import Input, Plan
from multimesh._src.jax_compat import avals

MAX_SIGNATURES = 16

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """How a variant takes one argument.

    `specs` are the layouts that fit: the one that the step uses, and the one that the argument had
    when the variant was traced. `decided` says that a match decided the submesh, so that an
    argument that lies elsewhere is moved. Results follow the memory that an argument came in, so
    another memory is another variant.
    """

    mesh: Any  # a concrete mesh
    specs: tuple[Dims, ...]
    decided: bool
    devices: frozenset[Any]
    memory_kind: str | None = None

    def fits(self, sharding: NamedSharding) -> bool:
        """Whether an argument with this sharding can be taken."""
        if dims_on(sharding.spec, self.mesh) not in self.specs:
            return False
        return self.decided or sharding.device_set == self.devices


def taken(
    sharding: NamedSharding,
    traced_with: PartitionSpec | None,
    decided: bool,
    memory_kind: str | None = None,
) -> Taken:
    """Records how an argument is taken."""
    specs = [dims_on(sharding.spec, sharding.mesh)]
    if traced_with is not None:
        specs.append(dims_on(traced_with, sharding.mesh))
    devices = frozenset(sharding.device_set)
    return Taken(sharding.mesh, tuple(specs), decided, devices, memory_kind)


def takes_of_plan(plan: Plan, traced: TracedFunction, matched: bool) -> tuple[Taken | None, ...]:
    """Records how a plan takes each flat argument.

    A match decided the submesh of an argument if some task matched and the argument did not lie on
    that submesh anyway when the function was traced.
    """
    takes: list[Taken | None] = [None] * len(traced.arguments)
    for entry in plan.inputs:
        sharding = user_sharding(plan, entry)
        if sharding is not None and takes[entry.argument] is None:
            argument = traced.arguments[entry.argument]
            placement = argument.placement
            lay_there = placement is not None and placement.device_set == sharding.device_set
            traced_with = argument.spec if placement is None else placement.spec
            decided = matched and not lay_there
            takes[entry.argument] = taken(sharding, traced_with, decided, argument.memory_kind)
    return tuple(takes)


def user_sharding(plan: Plan, entry: Input) -> NamedSharding | None:
    """Returns the sharding of an argument as the user holds it; None if it is unused.

    A batch `[..., B, ...]` that is stored as `[m, ..., B / m, ...]` has the layout of its rows, and
    a stack that is kept in blocks lies on the devices of all of them.
    """
    if not entry.slots:
        return None
    sharding = plan.slots[entry.slots[0]].sharding
    if entry.block is not None:
        return entry.block.whole_sharding(sharding)
    if not entry.microbatches:
        return sharding
    spec = PartitionSpec(*sharding.spec[1:])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def dims_on(spec: PartitionSpec, mesh: Any) -> Dims:
    """Returns `spec` retargeted to `mesh`: axes of size 1 and closed trailing dims drop out."""
    dims = []
    for entry in spec:
        names = (entry,) if isinstance(entry, str) else entry
        dims.append(
            tuple(n for n in names if mesh.shape.get(n) != 1) if isinstance(names, tuple) else ()
        )
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form. `run` takes and gives flat lists; `taken` is None for free arguments.

    A variant with `one_device_set` is plain JAX (R15): it fits arguments that lie together.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    out_tree: Any
    taken: tuple[Taken | None, ...]
    one_device_set: bool

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments that lie as `leaves` do can be taken."""
        if self.one_device_set:
            return len(device_sets(leaves)) <= 1
        for leaf, take in zip(leaves, self.taken, strict=True):
            if take is not None and _is_elsewhere_in_memory(leaf, take):
                return False
            placement = placement_of(leaf)
            if take is None or placement is None or placement.num_devices == 1:
                continue
            if not take.fits(placement):
                return False
        return True


def _is_elsewhere_in_memory(leaf: Any, take: Taken) -> bool:
    return getattr(leaf, "committed", False) and memory_of(leaf) != take.memory_kind


def device_sets(leaves: Sequence[Any]) -> set[frozenset[Any]]:
    """Returns the device sets on which committed arrays lie."""
    return {
        frozenset(leaf.sharding.device_set) for leaf in leaves if getattr(leaf, "committed", False)
    }


@dataclass(frozen=True, slots=True)
class Signature:
    """The types and shardings of the leaves of an earlier call, and the variant that it took."""

    avals: list[Any]
    shardings: list[Any]
    committed: list[bool] | None  # where the variant cares
    variant: Variant

    def matches(self, types: list[Any], shardings: list[Any], leaves: Sequence[Any]) -> bool:
        """Whether a call is like the earlier one. Equal objects are mostly identical ones."""
        if types != self.avals or shardings != self.shardings:
            return False
        return self.committed is None or _committed(leaves) == self.committed


def describe(leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the types and the shardings of the leaves."""
    try:
        return [leaf.aval for leaf in leaves], [leaf.sharding for leaf in leaves]
    except AttributeError:  # host values among them
        types = [getattr(leaf, "aval", None) or plain_aval(leaf) for leaf in leaves]
        return types, [getattr(leaf, "sharding", None) for leaf in leaves]


def _committed(leaves: Sequence[Any]) -> list[bool]:
    return [getattr(leaf, "committed", False) for leaf in leaves]


@dataclass(slots=True)
class VariantCache:
    """The variants of one function. Holds no arrays; emptied by `jax.clear_caches`."""

    _signatures: dict[Hashable, list[Signature]] = field(default_factory=dict)
    _variants: dict[Hashable, list[Variant]] = field(default_factory=dict)
    _epoch: int = -1
    _lock: Any = field(default_factory=threading.RLock)

    def find(self, key: Hashable, leaves: Sequence[Any], make: Callable[[], Variant]) -> Variant:
        """Returns the variant for a call, made by `make` when none fits.

        Args:
            key: Everything but types and placements of the arguments.
            leaves: The flat arguments.
            make: Traces and compiles a new variant for these arguments.
        """
        if self._epoch != avals.cache_epoch():
            self.clear()
        types, shardings = describe(leaves)
        for signature in self._signatures.get(key, ()):
            if signature.matches(types, shardings, leaves):
                return signature.variant
        with self._lock:
            variant = self._find_slowly(key, types, leaves, make)
            committed = _committed(leaves) if variant.one_device_set else None
            signature = Signature(types, shardings, committed, variant)
            kept = self._signatures.get(key, [])[: MAX_SIGNATURES - 1]
            self._signatures[key] = [signature, *kept]
        return variant

    def _find_slowly(
        self,
        key: Hashable,
        types: Sequence[Any],
        leaves: Sequence[Any],
        make: Callable[[], Variant],
    ) -> Variant:
        plain = tuple((aval.shape, aval.dtype, aval.weak_type) for aval in types)
        variants = self._variants.setdefault((key, plain), [])
        for variant in variants:
            if variant.fits(leaves):
                return variant
        variants.append(make())
        return variants[-1]

    def clear(self) -> None:
        """Forgets all variants."""
        with self._lock:
            self._signatures.clear()
            self._variants.clear()
            self._epoch = avals.cache_epoch()
