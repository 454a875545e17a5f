"""`explain()`: what a stranger reads, and what a test can assert on."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inline_snapshot import snapshot
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from multimesh.jax import context, mjit
from tests.report import small_step
from tests.report.small_step import BATCH, PARAMS, make_multi_mesh, step
from tests.staging import models


@pytest.fixture(scope="module")
def lowered():
    with make_multi_mesh():
        return mjit(step, donate_argnums=0).lower(PARAMS, BATCH)


def test_text_of_a_pipelined_step(lowered):
    assert str(lowered.explain()) == snapshot("""\
step: 7 tasks on 2 submeshes, 7 programs to compile (5 but for their devices).
  one call      13 runs of tasks, 7 copies with 7 values, 196 B between devices
  work          1.16 kFLOP: stage=0 39%, stage=1 61%
  state         320 B in 4 argument arrays; a device holds at most 308 B in a call (on stage=1)
  loop of 3     eager-1f1b on 2 ranks, makespan 12, idle 25.0%, at most 3 residual sets a rank
  worth a look  moved

Worth a look
  - moved: at every call, 192 B to stage=0, stage=1 and stored microbatch by microbatch: batch.
    -> that is usual for batches; `prepare_batch(..., sharding=)` does it ahead of the step, with
       `compiled.input_shardings`.

Submeshes and their memory
  submesh  devices   axes  state   peak  residuals  work a call
  -------  --------  ----  -----  -----  ---------  -----------
  stage=0  device 0  -     172 B  300 B     3, 0 B     448 FLOP
  stage=1  device 1  -     176 B  308 B    1, 32 B     715 FLOP
  state: arguments and constants on one device; peak: the most that one device holds in a call,
  without what XLA needs inside a program; residuals: sets that the schedule keeps at most, and
  their size, of whole arrays.

Tasks
  task                   action  submesh  runs  FLOP  reads  writes  parameters  begins at
  ---------------------  ------  -------  ----  ----  -----  ------  ----------  ----------------
  main                   before  stage=0     1     0    0 B    64 B      0, 0 B  small_step.py:36
  main#2                 before  stage=1     1     0    0 B    64 B      0, 0 B  small_step.py:36
  layer0_fwd             0F      stage=0     3    64  164 B    32 B     1, 64 B  small_step.py:31
  layer1_fwd+layer1_bwd  1F+BW   stage=1     3   233  264 B   100 B     1, 64 B  small_step.py:31
  layer0_bwd             0BW     stage=0     3    80  196 B    64 B      0, 0 B  small_step.py:31
  main#3                 after   stage=0     1    16  128 B    64 B     1, 64 B  small_step.py:37
  main#4                 after   stage=1     1    16  128 B    64 B     1, 64 B  small_step.py:37
  Of one run: what it reads and writes, and how many of the arrays that it reads are arguments of
  the function (parameters and state, no microbatches), of whole arrays. action: stage and F
  (forward), B, W (halves of the backward) or BW (all of it); before and after: once, outside of the
  loops. `main` is code in no registered scope. FLOP: counted from the traced program, of whole
  arrays: 2mnk for a product of matrices (and so for a convolution), one per element of arithmetic
  and of what is reduced, times the length of scans; a `while` counts as one turn, a `cond` as its
  costliest branch. Moves count nothing.

Reshards: 196 B a call, the largest first
  value of               type          from -> to             copies  bytes
  ---------------------  ------------  ---------------------  ------  -----
  layer0_fwd             float32[2,4]  stage=0 -> stage=1          3   96 B
      a value, made in `layer0` (small_step.py:31), read in `layer1` (small_step.py:31), by
      layer1_fwd+layer1_bwd
  layer1_fwd+layer1_bwd  float32[2,4]  stage=1 -> stage=0          3   96 B
      a gradient, made in the backward of `layer1` (small_step.py:31), read in the backward of
      `layer0` (small_step.py:31), by layer0_bwd
  layer1_fwd+layer1_bwd  float32[]     stage=1 -> everywhere       1    4 B
      a result, made in small_step.py:36, by result[1]
  bytes: in one call, what the target devices lack.

Arguments
  lives on  arrays  bytes  layout      moved
  --------  ------  -----  ----------  ----------  -----------------
  stage=0        1   64 B  replicated  first call  donated
      params[0]
  stage=1        1   64 B  replicated  first call  donated
      params[1]
  stage=0        1   96 B  replicated  every call  in 3 microbatches
      batch[0]
  stage=1        1   96 B  replicated  every call  in 3 microbatches
      batch[1]
  moved: for arguments that lie as they did when the function was traced; `first call` means that
  the result that takes the argument's place comes back where it is wanted. Results that live
  everywhere: result[1].

Code in no registered scope
  scope       lines                   placed on         in tasks
  ----------  ----------------------  ----------------  ------------------------
  (no scope)  small_step.py:36-37     stage=0           main, layer0_bwd, main#3
  (no scope)  small_step.py:32,36-37  stage=1           main#2,
                                                        layer1_fwd+layer1_bwd,
                                                        main#4
  (no scope)  small_step.py:32,36     where it is read  layer0_fwd, layer0_bwd,
                                                        layer1_fwd+layer1_bwd
  It runs where the fewest bytes cross, as part of the tasks named; what is cheap and reads nothing
  placed is computed by every task that reads it.

Registrations
  matcher   registered at     matched
  --------  ----------------  --------------
  layer\\d+  small_step.py:23  layer0, layer1

Schedule of a microbatch loop: 3 x layer0_fwd, layer1_fwd, layer1_bwd, layer0_bwd
  eager-1f1b: makespan 12, idle 25.0%
  stage=0  0F0 0F1 0F2 .   0BW0--- .   0BW1--- .   0BW2---
  stage=1  .   1F0 1BW0--- 1F1 1BW1--- 1F2 1BW2--- .   .
  Simulated; the unit of time is one F, one B or one W of a stage (a BW takes two); copies take
  none.
  By rank: at most 3, 1 residual sets; with 0 B, 32 B, of whole arrays.\
""")


def test_lowered_and_compiled_explain_alike(lowered):
    assert str(lowered.compile().explain()) == str(lowered.explain())


def test_rich_shows_the_same_facts(lowered):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(lowered.explain())
    shown = console.file.getvalue()
    for word in ("layer0_fwd", "1F+BW", "device 0", "params[1]", "first call", "0BW1"):
        assert word in shown, word
    assert max(map(len, shown.splitlines())) <= 100


def test_text_has_no_terminal_codes(lowered):
    assert "\033" not in lowered.explain().as_text()


def test_tasks(lowered):
    tasks = {task.label: task for task in lowered.program.tasks}
    first, last = tasks["layer0_fwd"], tasks["layer1_fwd+layer1_bwd"]
    assert (first.kind, first.stage, first.submesh) == ("F", 0, "stage=0")
    assert (last.kind, last.stage, last.submesh) == ("F+BW", 1, "stage=1")
    assert first.num_runs == last.num_runs == 3
    assert set(last.arguments) == {"batch[1]", "params[1]"}
    assert last.parameters == ("params[1]",), "microbatches are no parameters"
    assert last.parameter_bytes == 4 * 16
    assert first.flops >= 2 * 2 * 4 * 4
    assert last.num_in_place >= 2, "the gradient and the loss accumulate in place"
    assert first.origin.startswith(small_step.__file__)


def test_tasks_that_are_not_fused():
    with make_multi_mesh(), context(enable_task_fusion="never"):
        report = mjit(step).lower(PARAMS, BATCH).explain()
    kinds = {task.label: task.kind for task in report.tasks if task.stage == 1}
    assert kinds == {"layer1_fwd": "F", "layer1_bwd": "BW"}
    assert any(r.target == "layer1_fwd, layer1_bwd" for r in report.reshards)


def test_reshards_are_one_activation_and_one_gradient_per_microbatch(lowered):
    found = {(r.source, r.target, r.edge): (r.copies, r.bytes) for r in lowered.program.reshards}
    rows = 3 * 2 * 4 * 4  # microbatches * rows * columns * bytes
    last = "layer1_fwd+layer1_bwd"
    assert found == {
        ("layer0_fwd", last, "stage=0 -> stage=1"): (3, rows),
        (last, "layer0_bwd", "stage=1 -> stage=0"): (3, rows),
        (last, "result[1]", "stage=1 -> everywhere"): (1, 4),
    }


def test_arguments(lowered):
    found = {a.name: a for a in lowered.program.arguments}
    w, x = found["params[0]"], found["batch[0]"]
    assert (w.home, w.layout, w.moved, w.donated) == ("stage=0", "replicated", "first call", True)
    assert w.used_by[0] == "layer0_fwd"
    assert (x.home, x.moved, x.microbatches) == ("stage=0", "every call", 3)
    assert found["batch[1]"].home == "stage=1"


def test_arguments_that_lie_in_place_are_not_moved():
    with make_multi_mesh():
        compiled = mjit(step)
        params, _ = compiled(PARAMS, BATCH)
        report = compiled.lower(params, BATCH).explain()
    assert [a.moved for a in report.arguments[:2]] == ["never", "never"]


def test_sharded_values_count_bytes_of_every_device():
    multi_mesh = models.make_multi_mesh(layers_per_stage=1)

    def chain(w0, w1, x):
        with jax.named_scope("layer0"):
            x = x @ w0
        with jax.named_scope("layer1"):
            return x @ w1

    mesh = multi_mesh.slice(stage=0)
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, PartitionSpec("data")))
    w = np.ones((16, 16), np.float32)
    with multi_mesh:
        report = mjit(chain).lower(w, w, x).explain()
    (reshard,) = report.reshards
    replicas = 2  # on the model axis
    assert (reshard.value, reshard.bytes) == ("0f output 0", 8 * 16 * 4 * replicas)


def test_a_returned_and_an_unused_argument():
    def same(a, b):
        with jax.named_scope("layer0"):
            return a, b * 2

    multi_mesh = make_multi_mesh()
    with multi_mesh:
        report = mjit(same).lower(np.ones(32), np.ones(32)).explain()
        unused = mjit(lambda a, b: same(b, b)[1]).lower(np.ones(32), np.ones(32)).explain()
    assert report.arguments[0].returned_as == ("result[0]",)
    assert unused.arguments[0].moved == "unused"


def test_a_function_without_tasks_says_so():
    lowered = mjit(lambda x: x + 1).lower(1.0)
    assert lowered.program is None
    assert "has no tasks" in str(lowered.explain())


def test_equal_layers_are_one_row():
    multi_mesh = models.make_multi_mesh(layers_per_stage=4)

    def forward(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return x

    params = [np.ones((8, 8), np.float32)] * 8
    with multi_mesh:
        text = str(mjit(forward).lower(params, np.ones((4, 8), np.float32)).explain())
    assert "1f ... 3f" in text
    assert "4f ... 7f" in text
    assert "params[4] ... params[7]" in text
