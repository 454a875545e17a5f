"""Layer -> stage -> rank: which stage a layer belongs to and which submesh runs a stage.

Layers are cut into stages in their order. *Loop* placement puts stage s on rank s mod p, so chunk c
of rank r is stage c*p + r. *V* placement has two chunks: rank r holds the stages r and 2p-1-r.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from multimesh._src.errors import MatchError, message

PLACEMENTS = ("loop", "v")


@dataclass(frozen=True, slots=True)
class LayerStages:
    """How layers are spread over stages and stages over ranks.

    `layers_per_stage[s]` is the number of layers of stage s.
    """

    num_ranks: int
    layers_per_stage: tuple[int, ...]
    placement: str

    @property
    def num_layers(self) -> int:
        """The number of layers of all stages."""
        return sum(self.layers_per_stage)

    @property
    def num_stages(self) -> int:
        """The number of stages: ranks times chunks per rank."""
        return len(self.layers_per_stage)

    def stage_of(self, layer: int, where: str = "") -> int:
        """Returns the stage of a layer; `where` says what asks for it.

        Raises:
            MatchError: There is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise MatchError(
                message(
                    f"Layer `{layer}` is not among the `{self.num_layers}` registered layers: they "
                    f"are counted from `0` to `{self.num_layers - 1}`.",
                    where=where,
                    ways=(
                        "name the layers of the model from 0 on.",
                        "register as many layers as the model has (`num_layers=`).",
                        "make the matcher match only the layers.",
                    ),
                )
            )
        end = 0
        for stage, count in enumerate(self.layers_per_stage):
            end += count
            if layer < end:
                return stage
        raise AssertionError("layer counts do not add up")

    def rank_of(self, stage: int) -> int:
        """Returns the rank that runs a stage."""
        if self.placement == "v" and stage >= self.num_ranks:
            return 2 * self.num_ranks - 1 - stage
        return stage % self.num_ranks

    def layers_of(self, stage: int) -> range:
        """Returns the layers of a stage."""
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])


def plan_layers(
    num_layers: int,
    num_ranks: int,
    *,
    interleave: int = 1,
    placement: str = "loop",
    layers_per_stage: Sequence[int] | None = None,
    balance: Sequence[float] | None = None,
) -> LayerStages:
    """Cuts layers into `num_ranks * interleave` stages.

    Args:
        num_layers: Number of layers, counted from 0.
        num_ranks: Number of submeshes.
        interleave: Stages (chunks) per rank.
        placement: `"loop"` or `"v"`; V placement needs `interleave=2`.
        layers_per_stage: The number of layers of each stage. Default: as even as possible, earlier
            stages get one layer more (the last one also has the loss).
        balance: Cost of each layer in any unit. Stages are cut so that the costliest stage costs
            least. Excludes `layers_per_stage`.

    Raises:
        MatchError: The numbers do not fit together.
    """
    _check_numbers(num_layers, num_ranks, interleave, placement)
    num_stages = num_ranks * interleave
    if layers_per_stage is not None and balance is not None:
        raise MatchError("Both `layers_per_stage` and `balance` are given: give one of them.")
    if layers_per_stage is not None:
        counts = _checked_counts(layers_per_stage, num_layers, num_stages)
    else:
        _check_enough_layers(num_layers, num_stages)
        counts = _even(num_layers, num_stages)
        if balance is not None:
            counts = _balanced(_checked_costs(balance, num_layers), num_stages)
    return LayerStages(num_ranks, counts, placement)


def _check_numbers(num_layers: int, num_ranks: int, interleave: int, placement: str) -> None:
    numbers = {"num_layers": num_layers, "number of submeshes": num_ranks, "interleave": interleave}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise MatchError(f"`{name}={value!r}`: it must be an integer of at least 1.")
    if placement not in PLACEMENTS:
        raise MatchError(f"No placement `{placement}`: the placements are `loop` and `v`.")
    if placement == "v" and interleave != 2:
        raise MatchError(
            message(
                f"`placement='v'` has two stages a submesh, but `interleave={interleave}`.",
                ways=("set `interleave=2`.", "use `placement='loop'`."),
            )
        )


def _check_enough_layers(num_layers: int, num_stages: int) -> None:
    if num_layers >= num_stages:
        return
    raise MatchError(
        message(
            f"`{num_layers}` layers cannot fill `{num_stages}` stages.",
            ways=(
                "use fewer submeshes or a smaller `interleave`.",
                "give `layers_per_stage` with zeros for stages that hold other tasks only.",
            ),
        )
    )


def _checked_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    counts = tuple(counts)
    if len(counts) != num_stages:
        raise MatchError(
            f"`layers_per_stage={counts}` has `{len(counts)}` entries for `{num_stages}` stages."
        )
    if any(count < 0 for count in counts):
        raise MatchError(f"`layers_per_stage={counts}` has a negative entry.")
    placed = sum(counts)
    if placed != num_layers:
        problem = (
            f"{num_layers - placed} layers are left unplaced"
            if placed < num_layers
            else f"{placed - num_layers} places have no layer"
        )
        raise MatchError(
            message(
                f"`layers_per_stage={counts}` places `{placed}` layers, but "
                f"`num_layers={num_layers}`: {problem}.",
                ways=("make the entries add up to `num_layers`.",),
            )
        )
    return counts


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def _checked_costs(balance: Sequence[float], num_layers: int) -> tuple[float, ...]:
    costs = tuple(float(cost) for cost in balance)
    if len(costs) != num_layers:
        raise MatchError(
            f"`balance` has `{len(costs)}` costs for `num_layers={num_layers}` layers."
        )
    bad = [cost for cost in costs if not 0 <= cost < float("inf")]
    if bad:
        raise MatchError(f"`balance` has the cost `{bad[0]}`: costs are finite and not negative.")
    return costs


def _balanced(costs: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """Cuts layers into contiguous stages of at least one layer; the largest cost is minimal.

    The classic linear partition: best[k][n] is the least possible largest cost of the first n
    layers in k stages. Ties go to the later cut, so that earlier stages hold more layers.
    """
    num_layers = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for k in range(1, num_stages + 1):
        for n in range(k, num_layers + 1):
            best[k][n], cut[k][n] = min(
                ((max(best[k - 1][i], before[n] - before[i]), i) for i in range(k - 1, n)),
                key=lambda choice: (choice[0], -choice[1]),
            )
    ends = [num_layers]
    for k in range(num_stages, 0, -1):
        ends.append(cut[k][ends[-1]])
    return tuple(end - start for end, start in zip(ends[-2::-1], ends[:0:-1], strict=True))
