"""What lives on a rank while a schedule runs: as many residual sets as it promises, no more.

Counted by weak references on the arrays that the executor receives.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from multimesh._src.runtime.buffers import reads, writes
from multimesh._src.schedule.actions import Action, Kind, actions_of
from multimesh.jax import microbatch
from tests.core import chain
from tests.core.chain import BUILT_IN, WIDTH, Cut, cut_for
from tests.core.watched import Watched, watch

pytestmark = pytest.mark.core

NUM_RANKS, NUM_MICROBATCHES = 4, 8


def train(cut: Cut, schedule: str, fun=chain.loss, **options) -> Watched:
    params, batch = chain.make_params(cut.num_layers), chain.make_batch(cut.num_microbatches)
    return watch(cut, chain.train_step(schedule, fun), params, batch, **options)


def by_rank(counts, num_ranks: int = NUM_RANKS) -> tuple[int, ...]:
    return tuple(counts[rank] for rank in range(num_ranks))


def promised(schedule: str, p: int, m: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Peaks until B and until W, by the closed forms."""
    ranks, two = range(p), 2 * p
    forms = {
        "gpipe": (lambda r: m, lambda r: m),
        "1f1b": (lambda r: p - r, lambda r: p - r),
        "eager-1f1b": (lambda r: 2 * (p - r) - 1, lambda r: 2 * (p - r) - 1),
        "interleaved-1f1b": (lambda r: 2 * (p - 1 - r) + p + 1,) * 2,
        "looped-bfs": (lambda r: 2 * m,) * 2,
        "zb-h1": (lambda r: p - r, lambda r: p),
        "zb-h2": (lambda r: 2 * (p - r) - 1, lambda r: two - 1),
        "zb-v": (lambda r: two, lambda r: two),
        "dualpipe-v": (lambda r: two + 1, lambda r: two + 1),
    }
    until_b, until_w = forms[schedule]
    return tuple(map(until_b, ranks)), tuple(map(until_w, ranks))


@pytest.mark.parametrize("fusion", ["auto", pytest.param("never", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", BUILT_IN)
def test_live_residual_sets_are_those_of_the_schedule(schedule, fusion):
    watched = train(cut_for(schedule, NUM_RANKS, NUM_MICROBATCHES), schedule, fusion=fusion)
    peaks = watched.simulation.peaks
    expected = promised(schedule, NUM_RANKS, NUM_MICROBATCHES)
    assert (peaks.until_b, peaks.until_w) == expected
    assert (by_rank(watched.until_b), by_rank(watched.until_w)) == expected

    # at most the receiver's warm-up + 1 values are in flight per edge
    rows = watched.simulation.schedule.rows
    for edge, most in watched.in_flight.items():
        target = edge.split(" -> ")[1]
        if target != "everywhere":
            assert most <= warm_up(rows[int(target.removeprefix("stage="))]) + 1, edge


@pytest.mark.parametrize("remat", [False, True])
def test_reported_bytes_are_those_of_the_arrays(remat):
    """Under remat a stage keeps what came in; without it also what it made."""
    cut = Cut(NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    watched = train(cut, "1f1b", functools.partial(chain.loss, remat=remat), fusion="never")
    peaks = watched.simulation.peaks
    for rank in range(NUM_RANKS):
        infos = [watched.plan.slots[slot] for slot in watched.residuals[rank, 0].all]
        size = sum(info.aval.size * info.aval.dtype.itemsize for info in infos)
        assert peaks.num_bytes[rank] == peaks.until_b[rank] * size
    if remat:
        array = 4 * chain.SIZE * WIDTH
        assert peaks.num_bytes[:3] == (0, 3 * array, 2 * array)


def warm_up(row) -> int:
    """How many forwards stand before the first backward."""
    actions: list[Action] = [action for entry in row for action in actions_of(entry)]
    return next(k for k, action in enumerate(actions) if action.kind is not Kind.F)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_peaks_do_not_grow_with_the_number_of_microbatches(schedule):
    few = train(Cut(2, num_microbatches=4), schedule)
    many = train(Cut(2, num_microbatches=16), schedule)
    assert by_rank(few.until_w, 2) == by_rank(many.until_w, 2)
    assert few.in_flight == many.in_flight


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_gradient_taken_outside_the_loop_keeps_no_more(schedule):
    cut = Cut(NUM_RANKS, num_microbatches=NUM_MICROBATCHES)

    def step(params, batch):
        mean = microbatch(chain.loss, 0, chain.SIZE, argnum=1, schedule=schedule, reduce="mean")
        return jax.value_and_grad(mean)(params, batch)

    args = (chain.make_params(cut.num_layers), chain.make_batch(NUM_MICROBATCHES))
    watched = watch(cut, step, *args)
    expected = promised(schedule, NUM_RANKS, NUM_MICROBATCHES)
    assert (by_rank(watched.until_b), by_rank(watched.until_w)) == expected


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v"])
def test_accumulators_are_added_to_in_place(schedule):
    cut = cut_for(schedule, 2, 6)
    watched = train(cut, schedule)
    sums: dict[int, list[int]] = {}
    for number, parts in watched.tasks.items():
        for slot in writes(watched.plan.steps[number]):
            last = [task for task in parts if task.kind != "F"]
            if last and watched.plan.slots[slot].aval.shape == (WIDTH, WIDTH):
                sums.setdefault(last[-1].stage, []).append(watched.pointers[slot])
    assert sorted(sums) == list(range(cut.num_layers))
    for stage, pointers in sums.items():
        assert len(pointers) == cut.num_microbatches, stage
        assert len(set(pointers)) == 1, f"the gradient of stage {stage} moves about"


def test_slices_of_the_batch_are_no_arrays():
    """A task slices inside; the first stage keeps what it makes, not what it was given."""
    watched = train(Cut(3, num_microbatches=4), "1f1b")
    shape = (chain.SIZE, WIDTH)
    for i in range(4):
        first, second = (watched.residuals[stage, i].all for stage in (0, 1))
        assert len(first) == len(second) - 1, "the second keeps what has come, too"
        assert all(watched.plan.slots[slot].aval.shape == shape for slot in (*first, *second))
    batch = [entry.slots for entry in watched.plan.inputs if entry.microbatches]
    assert len(batch) == 2
    outside = [s for n, s in enumerate(watched.plan.steps) if n not in watched.tasks]
    made = {slot for step in outside if hasattr(step, "task") for slot in writes(step)}
    assert all(watched.plan.slots[slot].aval.shape != shape for slot in made)


def scaled_loss(params, batch):
    """Every layer's weights are made of the parameters: the same in every microbatch."""
    x, y = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ jnp.sin(w))
    return jnp.mean((x - y) ** 2)


def test_loop_invariant_values_are_no_residuals():
    cut = Cut(2, num_microbatches=4)
    watched = train(cut, "gpipe", scaled_loss)
    for (stage, _), residuals in watched.residuals.items():
        shapes = {watched.plan.slots[slot].aval.shape for slot in residuals.all}
        assert (WIDTH, WIDTH) not in shapes, f"stage {stage} keeps weights for each microbatch"
    read = [slot for n in watched.tasks for slot in reads(watched.plan.steps[n])]
    weights = {s for s in read if watched.plan.slots[s].aval.shape == (WIDTH, WIDTH)}
    made = {slot for number in watched.tasks for slot in writes(watched.plan.steps[number])}
    assert len(weights - made) <= 4 * cut.num_layers
