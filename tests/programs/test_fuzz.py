"""Random programs against plain `jax.jit` by R1; `make fuzz` runs more of them."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings, strategies as st

from tests.oracle import IllConditionedError
from tests.programs.compare import check_program
from tests.programs.spec import Layer, Spec, draw_spec

NUM_PROGRAMS = 50
NUM_BATCHES = 5  # so that xdist can share them out


class Drawn:
    """A `spec.Source` whose choices are hypothesis's, so that it can shrink them."""

    def __init__(self, draw: Any):
        self._draw = draw

    def choice(self, options: Any) -> Any:
        return self._draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def specs(draw: Any) -> Spec:
    return draw_spec(Drawn(draw))


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_random_programs(batch: int) -> None:
    def check(spec: Spec) -> None:
        try:
            check_program(spec)
        except IllConditionedError:
            reject()

    run = settings(
        max_examples=NUM_PROGRAMS // NUM_BATCHES,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes: `fuzz --spec` does it
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )(given(specs())(check))
    seed(batch)(run)()
    jax.clear_caches()


ONE_LAYER_EACH = (Layer(("matmul", "tanh")), Layer(("matmul",), submesh=1))


@pytest.mark.core
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
def test_small_pipeline(schedule: str, num_microbatches: int) -> None:
    check_program(
        Spec(
            ONE_LAYER_EACH,
            sliced=(2, 2, 1),
            unlike=None,
            num_microbatches=num_microbatches,
            schedule=schedule,
            optimizer="clipped adamw",
            constrained=True,
            num_steps=5,
        )
    )


def stages(*layers: tuple[tuple[str, ...], int], **last: Any) -> tuple[Layer, ...]:
    """Layers of given ops and submesh, each a stage; `last` holds for the last one."""
    made = [Layer(ops, submesh=place, stage=i) for i, (ops, place) in enumerate(layers)]
    return (*made[:-1], replace(made[-1], **last))


MATMUL, TANH = ("matmul",), ("matmul", "tanh")
LOOPED = {"unlike": None, "num_microbatches": 2, "schedule": "", "chunks": 2}
TWICE = [(("bias",), 0), (("bias",), 1), (("conditional",), 2)] * 2
SKIPPING = stages(*TWICE, (("tanh",), 3), scoped=False, checkpoint=True, skip=0)


@pytest.mark.parametrize(
    "spec",
    [
        # What a remat region recomputes by control flow was sent to another stage again.
        Spec(
            stages((("conditional",), 0), (("tanh",), 1), (("relu",), 0), (("bias",), 1)),
            sliced=(2, 1, 1),
            checkpoint=True,
            **LOOPED,
        ),
        # Code in no scope, read by two stages of one submesh, ran with the later one.
        Spec(SKIPPING, sliced=(4, 1, 1), **LOOPED),
        Spec(SKIPPING, sliced=(4, 1, 1), checkpoint=True, gated=0, **LOOPED),
        # The choice between branches joined a stage that it comes after.
        Spec(
            (Layer(MATMUL, stage=0), *stages((MATMUL, 0), (MATMUL, 1), (MATMUL, 0))),
            sliced=(2, 1, 1),
            gated=1,
            **LOOPED,
        ),
        # A gradient that a remat region hands on came from the half that runs later.
        Spec(
            (
                *stages((MATMUL, 0), (MATMUL, 1)),
                Layer(("bias",), submesh=1, stage=2, checkpoint=True),
                Layer(MATMUL, stage=3),
            ),
            sliced=(2, 1, 1),
            **(LOOPED | {"num_microbatches": 6, "schedule": "zb-v", "placement": "v"}),
        ),
        # Two stages on one submesh, one recomputed what the other needs.
        Spec(
            stages((MATMUL, 0), (TANH, 1), (TANH, 1), (TANH, 0)),
            sliced=(2, 1, 1),
            checkpoint=True,
            **(LOOPED | {"placement": "v"}),
        ),
        # The first stage waited for a predicate from the last one.
        Spec(
            (Layer(MATMUL, stage=0), *stages((MATMUL, 0), (MATMUL, 1))),
            sliced=(2, 1, 1),
            unlike=None,
            num_microbatches=8,
            gated=1,
        ),
        # A predicate that an earlier stage reads was made in a later one.
        Spec(
            stages((MATMUL, 0), (MATMUL, 1), (MATMUL, 0)),
            sliced=(2, 1, 1),
            gated=1,
            **(LOOPED | {"schedule": "auto"}),
        ),
        # The backward of code in no scope ran in a stage that needs what it recomputes.
        Spec(
            (
                *stages((MATMUL, 0), (MATMUL, 1)),
                Layer(("norm",), submesh=1, stage=1, scoped=False),
                Layer(("tanh", "scanned", "matmul", "tanh"), submesh=1, stage=2),
            ),
            sliced=(2, 1, 1),
            checkpoint=True,
            **(LOOPED | {"schedule": "auto", "placement": "v"}),
        ),
        # A remat region inside of a conditional was opened in what autodiff makes of it.
        Spec(
            (
                Layer(("stop", "mlp"), stage=0, checkpoint=True),
                *stages((MATMUL, 0), (("mlp", "stop"), 1), (("scanned",), 0)),
            ),
            sliced=(2, 1, 1),
            checkpoint=True,
            gated=0,
            **LOOPED,
        ),
        # A custom derivative in a conditional was not known as the forward pass's.
        Spec(
            (
                Layer(("tanh",), submesh=0, stage=0),
                Layer(("tanh",), submesh=1, stage=1),
                Layer(("sine",), submesh=1, stage=1),
                Layer(("norm",), submesh=2, stage=2),
                *(Layer(("tanh",), submesh=n, stage=3 + n) for n in range(3)),
            ),
            sliced=(3, 1, 1),
            checkpoint=True,
            gated=1,
            **LOOPED,
        ),
        # A stack of one row a stage, in another order than the stages, lay where it was read.
        Spec(
            stages((("norm",), 1), (("norm",), 3), (("norm",), 0)),
            sliced=(4, 1, 1),
            scanned=True,
            forward_only=True,
            **(LOOPED | {"num_microbatches": 0}),
        ),
    ],
)
def test_programs_that_failed_once(spec: Spec) -> None:
    check_program(spec)
