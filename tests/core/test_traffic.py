"""What crosses between submeshes in one step, and that nothing else does.

An MLP with adamw, clipping by the global norm and eight microbatches, on two and on four stages:
for each boundary and microbatch one activation and one gradient; for the norm one partial of each
submesh and the total back; the loss and the counter, which live everywhere.
"""

import pytest

from multimesh.jax import mjit
from tests.core import pipelined

pytestmark = pytest.mark.core

NUM_MICROBATCHES = pipelined.NUM_MICROBATCHES
ROWS = pipelined.BATCH[0].shape[0] // NUM_MICROBATCHES


def edges(reshards, type_: str) -> list[tuple[str, int]]:
    return sorted((r.edge, r.copies) for r in reshards if r.type == type_)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_step_moves_what_it_must(num_stages):
    with pipelined.make_multi_mesh(num_stages, layers_per_stage=4 // num_stages):
        lowered = mjit(pipelined.step).lower(pipelined.make_state(), pipelined.BATCH)
    crossing = [reshard for reshard in lowered.program.reshards if reshard.bytes]
    neighbours = [(s, s + 1) for s in range(num_stages - 1)]
    others = range(1, num_stages)

    activations = [f"stage={a} -> stage={b}" for a, b in neighbours]
    gradients = [f"stage={b} -> stage={a}" for a, b in neighbours]
    assert edges(crossing, f"float32[{ROWS},{pipelined.WIDTH}]") == sorted(
        (edge, NUM_MICROBATCHES) for edge in activations + gradients
    )

    partials = [f"stage={s} -> stage=0" for s in others]
    totals = [f"stage=0 -> stage={s}" for s in others]
    loss = f"stage={num_stages - 1} -> everywhere"
    assert edges(crossing, "float32[]") == sorted((e, 1) for e in [*partials, *totals, loss])
    total = {r.value for r in crossing if r.edge in totals and r.type == "float32[]"}
    assert len(total) == 1

    assert edges(crossing, "int32[]") == [("stage=0 -> everywhere", 1)]
    results = {r.target for r in crossing if r.edge.endswith("everywhere")}
    assert results == {"result[1]", "result[0][1][1][0].count"}

    num_values = 2 * len(neighbours) * NUM_MICROBATCHES + 2 * len(others) + 2
    assert sum(r.copies for r in crossing) == num_values, "nothing else crosses"
    views = [r for r in lowered.program.reshards if not r.bytes]
    assert {r.value for r in views} == {"state[1][1][0].count"}
