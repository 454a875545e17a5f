"""Every schedule on an unmodified program gives what plain `jax.jit` gives (R1)."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_snapshot import snapshot
from jax.sharding import Mesh

from multimesh._src.errors import MatchError, ScheduleError
from multimesh.jax import MultiMesh, Task, context, microbatch, mjit, schedules
from multimesh.jax.schedules import make_schedule
from tests.core import chain
from tests.core.chain import BUILT_IN, LOOPED, ONE_CHUNK, V_SHAPED, Cut, cut_for

pytestmark = pytest.mark.core

CASES = (
    *((name, 1, "loop") for name in (*ONE_CHUNK, None)),
    *((name, 2, "loop") for name in LOOPED),
    *((name, 2, "v") for name in V_SHAPED),
)
QUICK = ("1f1b", "zb-h1", "dualpipe-v")


def check(cut: Cut, step, plain, key, **options):
    """Runs `step` on the stages of `cut` and compares it with plain jit of `plain`."""
    num_layers = options.get("num_layers") or cut.num_layers
    args = (chain.make_params(num_layers), chain.make_batch(cut.num_microbatches))
    ours = chain.run(chain.make_multi_mesh(cut, **options), step, *args)
    chain.against_jit(ours, (key, num_layers, cut.num_microbatches), plain, *args)
    return ours


# --- every name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "chunks", "placement"), CASES)
def test_a_schedule_gives_what_jit_gives(name, chunks, placement, num_ranks):
    cut = Cut(num_ranks, chunks, placement)
    check(cut, chain.train_step(name), chain.train_step(), "plain")


def test_schedules_that_add_in_ascending_order_are_bitwise_equal():
    cut = Cut(2, num_microbatches=4)
    names = ("gpipe", "1f1b", "eager-1f1b")
    results = [check(cut, chain.train_step(name), chain.train_step(), "plain") for name in names]
    assert all(chain.same_bits(results[0], other) for other in results[1:])


# --- programs -------------------------------------------------------------------------------------


def forward_only(schedule):
    def step(params, batch):
        return microbatch(chain.loss, 0, chain.SIZE, argnum=1, schedule=schedule)(params, batch)

    return step


def two_loops(schedule):
    def step(params, batch):
        value, grads = chain.gradient(chain.loss, schedule)(params, batch)
        params = chain.descend(params, grads)
        again, grads = chain.gradient(chain.loss, schedule)(params, batch)
        return chain.descend(params, grads), (value, again)

    return step


def code_around(schedule):
    """Something of the parameters before, between and after two loops."""

    def step(params, batch):
        scaled = jax.tree.map(lambda w: w * (1 + 0.1 * jnp.tanh(jnp.sum(w))), params)
        value, grads = chain.gradient(chain.loss, schedule)(scaled, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        scaled = jax.tree.map(lambda w, g: w - g / (1 + norm), scaled, grads)
        value, grads = chain.gradient(chain.loss, schedule)(scaled, (batch[0], batch[1] * value))
        return chain.descend(params, grads), jnp.log1p(value) + norm

    return step


def nested(schedule):
    def step(params, batch):
        value, grads = jax.jit(chain.gradient(chain.loss, schedule))(params, batch)
        return jax.jit(chain.descend)(params, grads), value

    return step


def gradient_outside(schedule):
    def step(params, batch):
        cut = microbatch(chain.loss, 0, chain.SIZE, argnum=1, schedule=schedule, reduce="mean")
        value, grads = jax.value_and_grad(cut)(params, batch)
        return chain.descend(params, grads), value

    return step


PROGRAMS = {
    "tied": functools.partial(chain.train_step, fun=functools.partial(chain.loss, tied=True)),
    "remat": functools.partial(chain.train_step, fun=functools.partial(chain.loss, remat=True)),
    "forward only": forward_only,
    "two loops": two_loops,
    "code around": code_around,
    "nested": nested,
    "gradient outside": gradient_outside,
}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BUILT_IN]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_under_every_schedule(program, name):
    make = PROGRAMS[program]
    check(cut_for(name, 2, 4), make(name), make(None), program)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("program", ["tied", "remat"])
def test_a_program_on_four_ranks(program, name):
    make = PROGRAMS[program]
    check(cut_for(name, 4), make(name), make(None), program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "looped-bfs", None])
def test_fewer_microbatches_than_ranks(name):
    cut = cut_for(name, 4, 2)
    check(cut, chain.train_step(name), chain.train_step(), "plain")


# --- ways to give a schedule ----------------------------------------------------------------------

CUT = Cut(2, num_microbatches=2)
ROWS = "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"


def named_mesh(cut: Cut = CUT, split=None, schedule=None) -> MultiMesh:
    """Tasks `fwd<layer>` and `bwd<layer>` on one stage each."""
    mesh = Mesh(np.array(jax.devices()[: cut.num_ranks]), ("stage",))
    multi_mesh = MultiMesh(global_mesh=mesh, schedule=schedule)

    def task(text, backprop):
        name = ("bwd" if backprop else "fwd") + text
        return Task(name=name, mesh_slice={"stage": int(text)}, split_backprop=split)

    multi_mesh.register_task(r"layer(\d+)", callback=task)
    return multi_mesh


def rows_of(multi_mesh, step, cut=CUT) -> str:
    """The schedule that a step got, with the step run and compared with plain jit."""
    args = (chain.make_params(cut.num_layers), chain.make_batch(cut.num_microbatches))
    ours = chain.run(multi_mesh, step, *args)
    key = ("plain", cut.num_layers, cut.num_microbatches)
    chain.against_jit(ours, key, chain.train_step(), *args)
    with multi_mesh:
        return mjit(step).lower(*args).schedule.schedule.as_text()


BY_OCCURRENCE = (("fwd0", "fwd0", "bwd0", "bwd0"), ("fwd1", "bwd1", "fwd1", "bwd1"))
BY_MICROBATCH = (
    [(0, "fwd0"), (1, "fwd0"), (0, "bwd0"), (1, "bwd0")],
    [(0, "fwd1"), (0, "bwd1"), (1, "fwd1"), (1, "bwd1")],
)


@pytest.mark.parametrize("rows", [ROWS, ROWS.split("\n"), BY_OCCURRENCE, BY_MICROBATCH])
def test_custom_rows(rows):
    assert rows_of(named_mesh(), chain.train_step(custom_schedule=rows)) == ROWS


@pytest.mark.parametrize("rows", [ROWS, ROWS.split("\n"), BY_OCCURRENCE, schedules.custom(ROWS)])
def test_rows_as_the_schedule(rows):
    with named_mesh():
        step = mjit(chain.train_step(rows))
        lowered = step.lower(chain.make_params(2), chain.make_batch(2))
    assert lowered.schedule.schedule.as_text() == ROWS


def test_rows_name_the_halves_of_a_split_backward():
    rows = (
        ("fwd0", "fwd0", "bwd0_x", "bwd0_w", "bwd0_x", "bwd0_w"),
        ("fwd1", "bwd1_x", "fwd1", "bwd1_x", "bwd1_w", "bwd1_w"),
    )
    text = rows_of(named_mesh(split=("_x", "_w")), chain.train_step(custom_schedule=rows))
    assert text == "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1F1 1B1 1W0 1W1"


@pytest.mark.parametrize("split", [False, True])
def test_rows_name_the_kind_where_forward_and_backward_have_one_name(split):
    """`register_layers` names both after the scope."""
    back = ("0:B", "0:W") if split else ("0:BW",)
    rows = (
        ("0:F", "0:F", *back, *back),
        ("1:F", "1:BW", (1, "1:F"), (1, "1:BW")),
    )
    text = rows_of(chain.make_multi_mesh(CUT), chain.train_step(custom_schedule=rows))
    assert text == (ROWS.replace("0BW0", "0B0 0W0").replace("0BW1", "0B1 0W1") if split else ROWS)


def test_a_name_of_both_kinds_alone_says_too_little():
    rows = (("0", "0", "0", "0"), ("1:F", "1:BW") * 2)
    text = error_of(chain.train_step(custom_schedule=rows), CUT, chain.make_multi_mesh(CUT))
    assert "`0` in row `0` is no task and no action." in text
    assert "(`0:F`, `0:BW`, `0:B`, `0:W`, `1:F`" in text


def test_suffixes_ask_for_a_split_that_the_schedule_does_not():
    with named_mesh(split=("_x", "_w")):
        step = mjit(chain.train_step("1f1b"))
        lowered = step.lower(chain.make_params(2), chain.make_batch(2))
    names = {task.name for task in lowered.program.tasks}
    assert {"fwd0", "bwd0_x", "bwd0_w", "bwd1_w"} <= names
    rows_of(named_mesh(split=("_x", "_w")), chain.train_step("1f1b"))


def test_a_schedule_object_and_a_rule():
    made = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    assert rows_of(named_mesh(), chain.train_step(made)) == made.as_text()
    assert rows_of(named_mesh(), chain.train_step(schedules.gpipe)) == made.as_text()
    parsed = schedules.parse_schedule(ROWS)
    assert rows_of(named_mesh(), chain.train_step(parsed)) == ROWS


def scanned(params, batch):
    """Gradient accumulation as people write it, without a word of ours."""
    cut = jax.tree.map(lambda x: x.reshape(-1, chain.SIZE, *x.shape[1:]), batch)

    def body(carry, microbatched):
        found = jax.value_and_grad(chain.loss)(params, microbatched)
        return jax.tree.map(jnp.add, carry, found), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    (value, grads), _ = jax.lax.scan(body, zeros, cut)
    num = cut[0].shape[0]
    return chain.descend(params, jax.tree.map(lambda g: g / num, grads)), value / num


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_schedule_of_the_surroundings_orders_a_scan(name):
    made = make_schedule(name, num_ranks=2, num_microbatches=2).as_text()
    assert rows_of(named_mesh(schedule=name), scanned) == made
    with context(schedule=name):
        assert rows_of(named_mesh(), scanned) == made
    # a loop's own word counts more
    assert rows_of(named_mesh(schedule=name), chain.train_step("eager-1f1b")) == (
        make_schedule("eager-1f1b", num_ranks=2, num_microbatches=2).as_text()
    )


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_uneven_layers(name):
    step = chain.train_step(name)
    check(Cut(2), step, chain.train_step(), "plain", num_layers=5, layers_per_stage=(2, 3))


@pytest.mark.parametrize(("name", "placement"), [("zb-v", "v"), ("interleaved-1f1b", "loop")])
def test_uneven_layers_of_chunks(name, placement):
    check(
        Cut(2, 2, placement),
        chain.train_step(name),
        chain.train_step(),
        "plain",
        num_layers=6,
        layers_per_stage=(2, 1, 1, 2),
    )


def test_every_layer_must_be_placed():
    cut = Cut(2, num_microbatches=2)
    with pytest.raises(MatchError) as info, chain.make_multi_mesh(cut, num_layers=2):
        mjit(chain.train_step())(chain.make_params(4), chain.make_batch(2))
    assert "Layer `2` is not among the `2` registered layers" in str(info.value)


# --- errors ---------------------------------------------------------------------------------------


def error_of(step, cut=CUT, multi_mesh=None) -> str:
    args = (chain.make_params(cut.num_layers), chain.make_batch(cut.num_microbatches))
    with pytest.raises(ScheduleError) as info, multi_mesh or named_mesh(cut):
        mjit(step).lower(*args)
    lines = str(info.value).split("\n")
    return "\n".join(textwrap.fill(line, 90, drop_whitespace=False) for line in lines)


def test_an_unknown_name_lists_the_known_ones():
    assert error_of(chain.train_step("1f2b")) == snapshot("""\
There is no schedule `1f2b`.
To mend it, either:
  1. use one of `gpipe`, `fill-drain`, `breadth-first`, `1f1b`, `eager-1f1b`, \n\
`interleaved-1f1b`, `looped-bfs`, `zb-h1`, `zb-h2`, `zero-bubble-h2`, `zb-v`, \n\
`dualpipe-v`, `wavefront`, `prefetch-wavefront`, `auto`.
  2. use an object of `multimesh.jax.schedules`, or rows of actions.\
""")


def test_too_few_microbatches():
    assert error_of(chain.train_step("zb-h2")) == snapshot("""\
Schedule `zb-h2` cannot do `2` microbatches on `2` ranks: it needs `3` or more (twice the \n\
ranks, less one).
To mend it, either:
  1. change the number of microbatches.
  2. use `"eager-1f1b"`, which takes any number.\
""")


def test_a_number_of_microbatches_that_interleaving_cannot_do():
    cut = Cut(2, 2, num_microbatches=5)
    text = error_of(chain.train_step("interleaved-1f1b"), cut, chain.make_multi_mesh(cut))
    assert text == snapshot("""\
Schedule `interleaved-1f1b` cannot do `5` microbatches on `2` ranks: microbatches go in \n\
rounds of `2`, which does not divide `5`; the nearest numbers that it can do are `4` and \n\
`6`.
To mend it, either:
  1. change the number of microbatches.
  2. use `"looped-bfs"`, which takes any number.\
""")


def test_another_placement():
    cut = Cut(2, 2, num_microbatches=4)
    text = error_of(chain.train_step("zb-v"), cut, chain.make_multi_mesh(cut))
    assert text == snapshot("""\
Schedule `zb-v` wants its stages on other ranks than the program has them.
    the schedule: stages 0, 1, ... on ranks `[0, 1, 1, 0]`
    the program:  stages 0, 1, ... on ranks `[0, 1, 0, 1]`
    stage 2 (`2`) lies on rank 0; the schedule wants it on rank 1
    stage 3 (`3`) lies on rank 1; the schedule wants it on rank 0
To mend it, either:
  1. use `"looped-bfs"`, or `"interleaved-1f1b"` where the ranks divide the number of \n\
microbatches.
  2. put the stages on the ranks that the schedule wants (`register_layers` does so for \n\
layers with `interleave=2, placement="v"`).\
""")


def test_one_chunk_schedules_on_several_stages_a_rank():
    cut = Cut(2, 2, num_microbatches=4)
    text = error_of(chain.train_step("1f1b"), cut, chain.make_multi_mesh(cut))
    assert text == snapshot("""\
Schedule `1f1b` wants its stages on other ranks than the program has them.
    the schedule: stages 0, 1, ... on ranks `[0, 1]`
    the program:  stages 0, 1, ... on ranks `[0, 1, 0, 1]`
    stage 2 (`2`) lies on rank 0 beside stage 0 (`0`); the schedule ends with stage 1
    stage 3 (`3`) lies on rank 1 beside stage 1 (`1`); the schedule ends with stage 1
To mend it, either:
  1. use `"looped-bfs"`, or `"interleaved-1f1b"` where the ranks divide the number of \n\
microbatches.
  2. put the stages on the ranks that the schedule wants (`register_layers` does so for \n\
layers with `interleave=1`).\
""")


def test_rows_that_do_not_fit():
    assert error_of(chain.train_step(custom_schedule="0F0 0BW0 0F1 0BW1")) == snapshot("""\
The custom schedule has `1` rows, but the program has `2` ranks.
To mend it: give one row for every submesh that holds stages, in the order of stages.\
""")
    rows = "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1"
    assert error_of(chain.train_step(custom_schedule=rows)) == snapshot("""\
`1BW1` is missing in the row of stage=1.
To mend it: let the row of each rank run every action of its stages once for each of the \n\
`2` microbatches, and nothing else.\
""")
    rows = (("fwd0", "fwd0", "bwd", "bwd"), BY_OCCURRENCE[1])
    assert error_of(chain.train_step(custom_schedule=rows)) == snapshot("""\
`bwd` in row `0` is no task and no action.
To mend it: use the names of tasks (`fwd0`, `fwd1`, `bwd1`, `bwd0`) or actions such as \n\
`2F0`.\
""")


def test_rows_that_deadlock():
    rows = "0F0 0BW0 0F1 0BW1\n1F1 1BW1 1F0 1BW0"
    assert error_of(chain.train_step(custom_schedule=rows)) == snapshot("""\
The schedule deadlocks:
  stage=0 waits in `0BW0` for `1BW0`, which stands later on stage=1
  stage=1 waits in `1F1` for `0F1`, which stands later on stage=0
            stage=0  stage=1
    step 0  0F0      1F1
    step 1  `0BW0`   1BW1  <-- here
    step 2  0F1      1F0
    step 3  0BW1     1BW0
To mend it: let every action stand after all that it needs, in the rows of all ranks.\
""")


def test_a_schedule_object_of_another_size():
    made = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    assert error_of(chain.train_step(made)) == snapshot("""\
Schedule `1f1b` has `4` microbatches, but the program has `2`.
To mend it: give the schedule by name or as a rule, which makes it for any size.\
""")


# --- backward that cannot be split ----------------------------------------------------------------


def scan_in_a_stage(params, batch):
    x, y = batch
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            if i == 1:
                x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack([w, w]))
            else:
                x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def test_a_scan_inside_a_stage_keeps_its_backward_whole_and_says_so():
    cut = Cut(2, num_microbatches=4)
    step = chain.train_step("zb-h1", scan_in_a_stage)
    check(cut, step, chain.train_step(None, scan_in_a_stage), "scan inside")
    with named_mesh(cut):
        lowered = mjit(step).lower(chain.make_params(2), chain.make_batch(4))
    rows = lowered.schedule.schedule.as_text().split("\n")
    assert "0W0" in rows[0]
    assert "1BW0" in rows[1] and "1W0" not in rows[1]
    text = " ".join(str(lowered.explain()).split())
    assert "contractions stand inside a scan: `bwd1` (test_schedules.py:" in text
