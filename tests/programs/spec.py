"""What a random program is: plain data, so that it prints, shrinks and can be typed in again."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from multimesh.jax.errors import ScheduleError
from multimesh.jax.schedules import make_schedule
from tests.programs.ops import OPS

T = TypeVar("T")

WIDTH = 8  # features; every op keeps activations of shape [batch, WIDTH]
# By stages a submesh and their placement; "" is the default schedule.
SCHEDULES = {
    (1, "loop"): ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "auto", ""),
    (2, "loop"): ("interleaved-1f1b", "looped-bfs", "auto", ""),
    (2, "v"): ("zb-v", "dualpipe-v", "auto", ""),
}
OPTIMIZERS = ("sgd", "momentum", "adamw", "clipped adamw", "guarded adamw", "two steps")
# (stage, data, model): slices of one mesh, all submeshes alike.
SLICED = ((2, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (3, 1, 2))
# (data, model) of each submesh, on devices of their own.
UNLIKE = (
    ((1, 1), (2, 1)),
    ((4, 1), (1, 1)),
    ((1, 2), (2, 1)),
    ((2, 2), (1, 2), (1, 1)),
    ((1, 1), (1, 1), (4, 1)),
    ((2, 1), (1, 4), (2, 1)),
)


class Source(Protocol):
    """Where the choices come from: a seeded generator, or hypothesis."""

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`; hypothesis shrinks towards the first."""
        ...

    def integer(self, low: int, high: int) -> int:
        """An integer of `low..high`, both included."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """A piece of the model: `ops` in turn on the activations, under one named scope."""

    ops: tuple[str, ...]
    submesh: int = 0
    stage: int = -1  # of the pipeline; -1: without one
    scoped: bool = True  # False: no scope, the partitioner decides
    checkpoint: bool = False
    skip: int = -1  # adds the output of that earlier layer
    tied: int = -1  # uses the parameters of that earlier layer, which has the same ops


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole program: model, loss, update, loop and placement."""

    layers: tuple[Layer, ...]
    sliced: tuple[int, int, int] | None  # stage, data, model
    unlike: tuple[tuple[int, int], ...] | None  # or one (data, model) a submesh
    explicit_axes: bool = False
    num_microbatches: int = 0  # 0: no microbatch loop
    schedule: str = "gpipe"
    chunks: int = 1  # stages on each submesh
    placement: str = "loop"
    second_loop: bool = False  # another loop, in its default schedule, evaluates the new parameters
    scanned: bool = False  # the layers, all alike, are iterations of one scan over stacks
    checkpoint: bool = False  # around the whole model
    gated: int = -1  # that layer and the next run under one cond
    reduce: str = "mean"
    aux: bool = False  # the loss function has an auxiliary output, stacked by the loop
    loss: str = "square"
    optimizer: str = "sgd"
    forward_only: bool = False
    constrained: bool = False  # logical shardings on activations and weights
    donate: bool = False
    num_steps: int = 1
    dtype: str = "float32"
    data_seed: int = 0

    @property
    def submeshes(self) -> tuple[tuple[int, int], ...]:
        """The (data, model) shape of each submesh."""
        if self.unlike is not None:
            return self.unlike
        assert self.sliced is not None
        stage, data, model = self.sliced
        return ((data, model),) * stage

    @property
    def largest(self) -> tuple[int, int]:
        """The shape of the largest submesh that is used: that of reference B."""
        used = [self.submeshes[layer.submesh] for layer in self.layers]
        return max(used, key=lambda shape: shape[0] * shape[1])


def draw_spec(source: Source) -> Spec:
    """Draws a program."""
    sliced = unlike = None
    if source.integer(0, 2) < 2:
        sliced = source.choice(SLICED)
        num_submeshes = sliced[0]
    else:
        unlike = source.choice(UNLIKE)
        num_submeshes = len(unlike)
    forward_only = source.integer(0, 5) == 5
    num_microbatches = 0 if forward_only else source.choice((0, 1, 2, 3, 4, 6, 8))
    chunks, placement = (1, "loop")
    if num_microbatches and source.integer(0, 3) == 3:
        chunks, placement = source.choice(((2, "loop"), (2, "v")))
    stages = stage_submeshes(num_submeshes, chunks, placement)
    layers = _draw_layers(source, num_submeshes, stages if num_microbatches else ())
    scanned = source.integer(0, 5) == 5
    return Spec(
        layers=tuple(map(replace_ops(layers[0].ops), layers)) if scanned else layers,
        sliced=sliced,
        unlike=unlike,
        explicit_axes=source.integer(0, 4) == 4,
        num_microbatches=num_microbatches,
        schedule=source.choice(_schedules(num_submeshes, num_microbatches, chunks, placement)),
        chunks=chunks,
        placement=placement,
        second_loop=num_microbatches > 0 and source.integer(0, 3) == 3,
        scanned=scanned,
        checkpoint=source.integer(0, 7) == 7,
        gated=source.integer(0, len(layers) - 2) if source.integer(0, 5) == 5 else -1,
        reduce=source.choice(("mean", "sum")),
        aux=source.integer(0, 3) == 3,
        loss=source.choice(("square", "cross entropy")),
        optimizer=source.choice(OPTIMIZERS),
        forward_only=forward_only,
        constrained=source.integer(0, 2) == 2,
        donate=source.integer(0, 2) == 2,
        num_steps=1 if forward_only else source.choice((1, 5)),
        dtype=source.choice(("float32", "float32", "bfloat16")),
        data_seed=source.integer(0, 1000),
    )


def stage_submeshes(num_submeshes: int, chunks: int, placement: str) -> tuple[int, ...]:
    """The submesh of each stage."""
    once = tuple(range(num_submeshes))
    return once * chunks if placement == "loop" else (*once, *reversed(once))


def replace_ops(ops: tuple[str, ...]) -> Callable[[Layer], Layer]:
    """A function that makes a layer like all others of a scan."""
    return lambda layer: replace(layer, ops=ops, scoped=True, checkpoint=False, skip=-1, tied=-1)


def _schedules(num_ranks: int, num_microbatches: int, chunks: int, placement: str) -> list[str]:
    """The schedules that can do so many microbatches."""
    found = []
    for name in SCHEDULES[chunks, placement]:
        try:
            make_schedule(
                name or None,
                num_ranks=num_ranks,
                num_microbatches=max(1, num_microbatches),
                num_chunks=chunks,
                placement=placement,
            )
        except ScheduleError:
            continue
        found.append(name)
    return found


def _draw_layers(source: Source, num_submeshes: int, stages: tuple[int, ...]) -> tuple[Layer, ...]:
    """Draws layers; `stages` has the submesh of each stage of a pipeline, empty without one."""
    layers: list[Layer] = []
    least = max(num_submeshes, len(stages))
    num_layers = source.integer(least, least + 3)
    # A pipeline runs through its stages in order; anything goes without one.
    drawn = [source.integer(0, (len(stages) or num_submeshes) - 1) for _ in range(num_layers)]
    if stages:
        drawn = sorted([*range(len(stages)), *drawn[len(stages) :]])
    for index, stage in enumerate(drawn):
        place = stages[stage] if stages else stage
        ops = tuple(source.choice(tuple(OPS)) for _ in range(source.integer(1, 4)))
        tied = -1
        if index and source.integer(0, 5) == 5:
            tied = source.integer(0, index - 1)
            ops = layers[tied].ops
        layers.append(
            Layer(
                ops=ops,
                submesh=place,
                stage=stage if stages else -1,
                # Every stage of a pipeline has a scope that names it.
                scoped=drawn.index(stage) == index or source.integer(0, 7) < 7,
                checkpoint=source.integer(0, 2) == 2,
                skip=source.integer(0, index - 1) if index and source.integer(0, 3) == 3 else -1,
                tied=tied,
            )
        )
    return tuple(layers)


def simpler(spec: Spec) -> Iterator[Spec]:
    """Yields programs that are one step simpler than `spec`, the boldest first."""
    for index in range(len(spec.layers)):
        if len(spec.layers) > 1:
            yield replace(spec, layers=_without(spec.layers, index))
    plain = Spec(layers=(), sliced=None, unlike=None)
    keep = ("layers", "sliced", "unlike")
    for field in dataclasses.fields(Spec):
        default = getattr(plain, field.name)
        if field.name not in keep and getattr(spec, field.name) != default:
            yield replace(spec, **{field.name: default})
    for count in (1, 2):
        if spec.num_microbatches > count:
            yield replace(spec, num_microbatches=count)
    if spec.unlike is not None or spec.sliced != (len(spec.submeshes), 1, 1):
        yield replace(spec, sliced=(len(spec.submeshes), 1, 1), unlike=None)
    for index in range(0 if spec.scanned else len(spec.layers)):  # all are alike in a scan
        for new in _simpler_layers(spec.layers, index):
            yield replace(spec, layers=(*spec.layers[:index], new, *spec.layers[index + 1 :]))


def _simpler_layers(layers: tuple[Layer, ...], index: int) -> Iterator[Layer]:
    layer = layers[index]
    is_shared = layer.tied >= 0 or any(other.tied == index for other in layers)
    if layer.tied >= 0:
        yield replace(layer, tied=-1)
    if layer.skip >= 0:
        yield replace(layer, skip=-1)
    if layer.checkpoint:
        yield replace(layer, checkpoint=False)
    if not layer.scoped:
        yield replace(layer, scoped=True)
    if not is_shared and len(layer.ops) > 1:
        for op in range(len(layer.ops)):
            yield replace(layer, ops=(*layer.ops[:op], *layer.ops[op + 1 :]))
    if not is_shared and layer.ops != ("matmul",):
        yield replace(layer, ops=("matmul",))


def _without(layers: tuple[Layer, ...], dropped: int) -> tuple[Layer, ...]:
    def renumbered(other: int) -> int:
        return -1 if other == dropped else other - (other > dropped)

    return tuple(
        replace(layer, skip=renumbered(layer.skip), tied=renumbered(layer.tied))
        for index, layer in enumerate(layers)
        if index != dropped
    )
