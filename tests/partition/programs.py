"""Small programs for the tests of the passes, and what the passes make of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh._src.config import enable_task_fusion
from multimesh._src.frontend.matching import Match
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh
from multimesh._src.frontend.tracing import TracedFunction
from multimesh._src.ir.flat import Equation, FlatProgram, Loop, Step, all_equations
from multimesh._src.partition.assign.cloned import Cloned, find_cloned
from multimesh._src.partition.assign.places import assign_places
from multimesh._src.partition.given import (
    default_submesh,
    placed_arguments,
    succeeded_arguments,
    wanted_submeshes,
)
from multimesh._src.partition.inline import inline
from multimesh._src.partition.loops import simplify_loops
from multimesh._src.partition.pipeline import Partitioned, partition
from multimesh._src.partition.prune import prune
from multimesh._src.partition.seeds import Seeds, find_seeds
from multimesh._src.staging.mjit import mjit


def traced(
    multi: MultiMesh, function: Callable[..., Any], *args: Any, **options: Any
) -> TracedFunction:
    """Traces `function` inside `multi`; `options` are those of `mjit`."""
    with multi:
        return mjit(function, **options).trace(*args)._traced


def cut(
    multi: MultiMesh, function: Callable[..., Any], *args: Any, fuse: str = "auto", **options: Any
) -> tuple[Partitioned, dict[str, str]]:
    """Partitions `function`; also returns the text after every pass."""
    texts: dict[str, str] = {}
    with multi, enable_task_fusion(fuse):
        made = partition(traced(multi, function, *args, **options), texts.__setitem__)
    return made, texts


def inlined(multi: MultiMesh, function: Callable[..., Any], *args: Any) -> FlatProgram:
    """The flat program before any other pass."""
    found = traced(multi, function, *args)
    return inline(found, Seeds(found.matcher))


def simplified(
    multi: MultiMesh, function: Callable[..., Any], *args: Any, hoist: bool = True
) -> FlatProgram:
    """The flat program with loops simplified."""
    found = traced(multi, function, *args)
    seeds = Seeds(found.matcher)
    return prune(simplify_loops(prune(inline(found, seeds)), seeds, hoist=hoist))


@dataclass(frozen=True, slots=True)
class Assigned:
    """A flat program with the submesh of each equation, before sums are regrouped."""

    flat: FlatProgram
    cloned: Cloned
    match: dict[int, Match]
    seeded: dict[int, int]
    place: dict[int, int]

    def of(self, primitive: str, number: int = 0) -> int:
        """The submesh of the `number`-th equation with this primitive."""
        return self.place[named(self.flat.steps, primitive)[number].serial]


def assigned(
    multi: MultiMesh,
    function: Callable[..., Any],
    *args: Any,
    max_cost: int = 1 << 20,
    max_elements: int = 16,
    **options: Any,
) -> Assigned:
    """Runs the passes up to the assignment of submeshes."""
    found = traced(multi, function, *args, **options)
    seeds = Seeds(found.matcher)
    flat = prune(simplify_loops(prune(inline(found, seeds)), seeds))
    match, seeded = find_seeds(flat, seeds)
    default = default_submesh(found, seeds)
    placed = placed_arguments(flat, found, seeds)
    cloned = find_cloned(
        flat, fixed=frozenset(placed), max_cost=max_cost, max_elements=max_elements
    )
    wanted = wanted_submeshes(found, seeds)
    succeeded = succeeded_arguments(flat, found)
    place = assign_places(flat, cloned, seeded, placed, wanted, succeeded, default)
    return Assigned(flat, cloned, match, seeded, place)


def named(steps: tuple[Step, ...], primitive: str) -> list[Equation]:
    """All equations with a primitive, in order, at any depth."""
    return [eq for eq in all_equations(steps) if eq.primitive == primitive]


def primitives(steps: tuple[Step, ...]) -> list[str]:
    """The primitives at one level; loops are called `loop`."""
    return ["loop" if isinstance(step, Loop) else step.primitive for step in steps]


def loops(steps: tuple[Step, ...]) -> list[Loop]:
    """The loops at one level."""
    return [step for step in steps if isinstance(step, Loop)]


def zeros(*shape: int, dtype: Any = "float32") -> Any:
    """An argument that only has a type."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


# --- the program of the text tests ---------------------------------------------------------------


def train(params: Any, x: Any) -> Any:
    """Two linear layers on two microbatches, clipped by global norm, plain gradient descent."""

    def loss(params: Any, x: Any) -> Any:
        for index, w in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                x = jnp.dot(x, w)
        return jnp.sum(x)

    value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, x)
    norm = sum(jnp.sum(g * g) for g in grads)
    scale = 1.0 / (1.0 + norm)
    return [p - scale * g for p, g in zip(params, grads, strict=True)], value


TRAIN_ARGS = ([zeros(8, 8), zeros(8, 8)], zeros(4, 8))
