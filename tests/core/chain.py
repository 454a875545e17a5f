"""A chain of tanh layers, cut into stages in every way, for the tests of schedules."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multimesh.jax import MultiMesh, microbatch, mjit
from tests.oracle import Comparison, Oracle, bitwise_equal, compare, reference_a, reference_b

Tree: TypeAlias = Any
Step: TypeAlias = Callable[[Tree, Tree], Tree]

WIDTH = 8
SIZE = 2  # rows of a microbatch


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages: `chunks` on each of `num_ranks` submeshes, and how often the loop runs."""

    num_ranks: int
    chunks: int = 1
    placement: str = "loop"
    num_microbatches: int = 8

    @property
    def num_layers(self) -> int:
        """One layer a stage."""
        return self.num_ranks * self.chunks


# Every name, with its aliases, on stages that it takes.
ONE_CHUNK = (
    "gpipe",
    "fill-drain",
    "breadth-first",
    "1f1b",
    "eager-1f1b",
    "wavefront",
    "prefetch-wavefront",
    "zb-h1",
    "zb-h2",
    "zero-bubble-h2",
    "auto",
)
LOOPED = ("interleaved-1f1b", "looped-bfs", "wavefront", "prefetch-wavefront", "auto", None)
V_SHAPED = ("zb-v", "dualpipe-v", "auto", None)
BUILT_IN = (*ONE_CHUNK[:1], "1f1b", "eager-1f1b", "zb-h1", "zb-h2", *LOOPED[:2], *V_SHAPED[:2])


def cut_for(name: str | None, num_ranks: int, num_microbatches: int = 8) -> Cut:
    """Stages that a built-in schedule takes."""
    chunks = 2 if name in (*LOOPED[:2], *V_SHAPED[:2]) else 1
    placement = "v" if name in V_SHAPED[:2] else "loop"
    return Cut(num_ranks, chunks, placement, num_microbatches)


def make_multi_mesh(cut: Cut, num_layers: int = 0, **options: Any) -> MultiMesh:
    """One device a rank; `options` are those of `register_layers` and `MultiMesh(schedule=)`."""
    mesh = Mesh(np.array(jax.devices()[: cut.num_ranks]), ("stage",))
    multi_mesh = MultiMesh(global_mesh=mesh, schedule=options.pop("schedule", None))
    multi_mesh.register_layers(
        r"layer(\d+)",
        num_layers=num_layers or cut.num_layers,
        interleave=cut.chunks,
        placement=cut.placement,
        **options,
    )
    return multi_mesh


@functools.cache
def make_params(num_layers: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(1), num_layers)
    return tuple(jax.random.normal(key, (WIDTH, WIDTH)) / 3 for key in keys)


@functools.cache
def make_batch(num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rows = num_microbatches * SIZE
    return tuple(rng.normal(size=(rows, WIDTH)).astype(np.float32) for _ in range(2))


def layer(i: int, w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope(f"layer{i}"):
        return jnp.tanh(x @ w)


def loss(params: Tree, batch: Tree, *, remat: bool = False, tied: bool = False) -> jax.Array:
    """Mean square; `tied`: the last layer takes the first one's weights, transposed."""
    x, y = batch
    for i, w in enumerate(params):
        apply = functools.partial(layer, i)
        if tied and i == len(params) - 1:
            w = params[0].T
        x = (jax.checkpoint(apply) if remat else apply)(w, x)
    return jnp.mean((x - y) ** 2)


def gradient(fun: Callable[..., Any], schedule: Any = None, **options: Any) -> Callable[..., Any]:
    """Value and gradient of `fun(params, batch)`, mean over the microbatches."""
    return microbatch(
        jax.value_and_grad(fun), 0, SIZE, argnum=1, schedule=schedule, reduce="mean", **options
    )


def descend(params: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda w, g: w - 0.5 * g, params, grads)


def train_step(schedule: Any = None, fun: Callable[..., Any] = loss, **options: Any) -> Step:
    """A step of gradient descent over the microbatches."""

    def step(params: Tree, batch: Tree) -> Tree:
        value, grads = gradient(fun, schedule, **options)(params, batch)
        return descend(params, grads), value

    return step


def run(multi_mesh: MultiMesh, step: Step, *args: Any) -> Tree:
    """What `step` gives on the submeshes, on the host; checks that it repeats bit for bit."""
    with multi_mesh:
        ours = mjit(step)
        results = [jax.tree.map(np.asarray, ours(*args)) for _ in range(2)]
    assert same_bits(*results), "a run repeated differs from itself"
    return results[0]


def against_jit(ours: Tree, key: Any, plain: Step, *args: Any) -> Comparison:
    """Compares with plain `jax.jit` of `plain` by R1; `key` names the program."""
    if key not in _references:
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        ref_a, ref_b = reference_a(plain, *args), reference_b(plain, mesh, args)
        _references[key] = (ref_a, ref_b, Oracle(plain, *args)(*args))
    comparison = compare(ours, *_references[key])
    comparison.check()
    return comparison


_references: dict[Any, tuple[Tree, Tree, Tree]] = {}


def same_bits(ours: Tree, theirs: Tree) -> bool:
    return jax.tree.all(jax.tree.map(bitwise_equal, ours, theirs))
