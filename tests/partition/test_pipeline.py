"""What every pass makes of one small program, as text that is the same on every JAX version."""

import subprocess
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from tests.partition.programs import TRAIN_ARGS, cut, train
from tests.programs.plainly import pipeline

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    _, found = cut(pipeline(2, 2), train, *TRAIN_ARGS)
    return found


def test_inline(texts: dict[str, str]) -> None:
    assert texts["inline"] == snapshot("""\
train(%0:float32[8,8], %1:float32[8,8], %2:float32[4,8]) constants ()
  %3:float32[2,2,8] = reshape %2
  %4:float32[8,8] = broadcast_in_dim 0.0
  %5:float32[8,8] = broadcast_in_dim 0.0
  loop %6 < 2: %7 = 0.0, %8 = %4, %9 = %5
    %10:float32[1,2,8] = dynamic_slice %3 %6 0 0
    %11:float32[2,8] = squeeze %10
    %12:float32[2,8] = dot_general %11 %0  [layer0]
    %13:float32[2,8] = dot_general %12 %1  [layer1]
    %14:float32[] = reduce_sum %13
    %15:float32[2,8] = broadcast_in_dim 1.0  [^T]
    %16:float32[8,8] = dot_general %15 %12  [layer1^T]
    %17:float32[8,8] = transpose %16  [layer1^T]
    %18:float32[2,8] = dot_general %15 %1  [layer1^T]
    %19:float32[8,8] = dot_general %18 %11  [layer0^T]
    %20:float32[8,8] = transpose %19  [layer0^T]
    %21:float32[] = add %7 %14
    %22:float32[8,8] = add %8 %20
    %23:float32[8,8] = add %9 %17
  end %24 <- %21, %25 <- %22, %26 <- %23
  %27:float32[8,8] = mul %25 %25
  %28:float32[] = reduce_sum %27
  %29:float32[] = add 0.0 %28
  %30:float32[8,8] = mul %26 %26
  %31:float32[] = reduce_sum %30
  %32:float32[] = add %29 %31
  %33:float32[] = add 1.0 %32
  %34:float32[] = div 1.0 %33
  %35:float32[8,8] = mul %34 %25
  %36:float32[8,8] = sub %0 %35
  %37:float32[8,8] = mul %34 %26
  %38:float32[8,8] = sub %1 %37
return %36, %38, %24\
""")


def test_simplify_loops(texts: dict[str, str]) -> None:
    assert texts["simplify_loops"] == snapshot("""\
train(%0:float32[8,8], %1:float32[8,8], %39:float32[2,2,8]) constants ()
  %4:float32[8,8] = broadcast_in_dim 0.0
  %5:float32[8,8] = broadcast_in_dim 0.0
  loop %6 < 2: %7 = 0.0, %8 = %4, %9 = %5
    %10:float32[1,2,8] = dynamic_slice %39 %6 0 0
    %11:float32[2,8] = squeeze %10
    %12:float32[2,8] = dot_general %11 %0  [layer0]
    %13:float32[2,8] = dot_general %12 %1  [layer1]
    %14:float32[] = reduce_sum %13
    %15:float32[2,8] = broadcast_in_dim 1.0  [^T]
    %16:float32[8,8] = dot_general %15 %12  [layer1^T]
    %17:float32[8,8] = transpose %16  [layer1^T]
    %18:float32[2,8] = dot_general %15 %1  [layer1^T]
    %19:float32[8,8] = dot_general %18 %11  [layer0^T]
    %20:float32[8,8] = transpose %19  [layer0^T]
    %21:float32[] = add %7 %14
    %22:float32[8,8] = add %8 %20
    %23:float32[8,8] = add %9 %17
  end %24 <- %21, %25 <- %22, %26 <- %23
  %27:float32[8,8] = mul %25 %25
  %28:float32[] = reduce_sum %27
  %29:float32[] = add 0.0 %28
  %30:float32[8,8] = mul %26 %26
  %31:float32[] = reduce_sum %30
  %32:float32[] = add %29 %31
  %33:float32[] = add 1.0 %32
  %34:float32[] = div 1.0 %33
  %35:float32[8,8] = mul %34 %25
  %36:float32[8,8] = sub %0 %35
  %37:float32[8,8] = mul %34 %26
  %38:float32[8,8] = sub %1 %37
return %36, %38, %24\
""")


def test_split_stacks(texts: dict[str, str]) -> None:
    """There is no stack; `test_stacks` has programs with some."""
    assert texts["split_stacks"] == texts["simplify_loops"]


def test_assign(texts: dict[str, str]) -> None:
    assert texts["assign"] == snapshot("""\
train(%0:float32[8,8], %1:float32[8,8], %39:float32[2,2,8]) constants ()
  %4:float32[8,8] = broadcast_in_dim 0.0 @0
  %5:float32[8,8] = broadcast_in_dim 0.0 @1
  loop %6 < 2: %7 = 0.0, %8 = %4, %9 = %5
    %10:float32[1,2,8] = dynamic_slice %39 %6 0 0 @0
    %11:float32[2,8] = squeeze %10 @0
    %12:float32[2,8] = dot_general %11 %0 @0  [layer0]
    %13:float32[2,8] = dot_general %12 %1 @1  [layer1]
    %14:float32[] = reduce_sum %13 @1
    %15:float32[2,8] = broadcast_in_dim 1.0 @1  [^T]
    %16:float32[8,8] = dot_general %15 %12 @1  [layer1^T]
    %17:float32[8,8] = transpose %16 @1  [layer1^T]
    %18:float32[2,8] = dot_general %15 %1 @1  [layer1^T]
    %19:float32[8,8] = dot_general %18 %11 @0  [layer0^T]
    %20:float32[8,8] = transpose %19 @0  [layer0^T]
    %21:float32[] = add %7 %14 @1
    %22:float32[8,8] = add %8 %20 @0
    %23:float32[8,8] = add %9 %17 @1
  end %24 <- %21, %25 <- %22, %26 <- %23
  %27:float32[8,8] = mul %25 %25 @0
  %28:float32[] = reduce_sum %27 @0
  %30:float32[8,8] = mul %26 %26 @1
  %31:float32[] = reduce_sum %30 @1
  %40:float32[] = add %28 1.0 @0
  %41:float32[] = add %40 0.0 @0
  %33:float32[] = add %41 %31 @1
  %34:float32[] = div 1.0 %33 @1
  %35:float32[8,8] = mul %34 %25 @0
  %36:float32[8,8] = sub %0 %35 @0
  %37:float32[8,8] = mul %34 %26 @1
  %38:float32[8,8] = sub %1 %37 @1
return %36, %38, %24\
""")


def test_split(texts: dict[str, str]) -> None:
    assert texts["split"] == snapshot("""\
program train
  submesh 0: stage=0 (stage=1, data=2)
  submesh 1: stage=1 (stage=1, data=2)
  argument %0:float32[8,8]
  argument %1:float32[8,8]
  argument %39:float32[2,2,8]
  task main - @ stage=0
    () -> (%4:float32[8,8])
  task main - @ stage=1
    () -> (%5:float32[8,8])
  loop %6 < 2 microbatches: %7 = 0.0, %8 = %4, %9 = %5
    task layer0_fwd F stage 0 @ stage=0
      (%39:float32[2,2,8], %6:int32[], %0:float32[8,8]) -> (%12:float32[2,8])
    task layer1_fwd F stage 1 @ stage=1
      (%12:float32[2,8], %1:float32[8,8], %7:float32[]) -> (%21:float32[])
    task layer1_bwd BW stage 1 @ stage=1
      (%12:float32[2,8], %1:float32[8,8], %9:float32[8,8]) -> (%18:float32[2,8], %23:float32[8,8])
    task layer0_bwd BW stage 0 @ stage=0
      (%18:float32[2,8], %39:float32[2,2,8], %6:int32[], %8:float32[8,8]) -> (%22:float32[8,8])
  end %24 <- %21, %25 <- %22, %26 <- %23
  task main - @ stage=0
    (%25:float32[8,8]) -> (%41:float32[])
  task main - @ stage=1
    (%26:float32[8,8], %41:float32[]) -> (%33:float32[])
  task main - @ stage=0
    (%33:float32[], %25:float32[8,8], %0:float32[8,8]) -> (%36:float32[8,8])
  task main - @ stage=1
    (%33:float32[], %26:float32[8,8], %1:float32[8,8]) -> (%38:float32[8,8])
  return %36, %38, %24\
""")


def test_emit(texts: dict[str, str]) -> None:
    assert texts["emit"] == snapshot("""\
input params[0] -> s4
input params[1] -> s10
input x -> s2 as 2 microbatches
constant index 0 -> s3
constant index 1 -> s7
constant literal -> s11
run main:  -> s0
run main:  -> s1
run layer0_fwd[0]: s2 s3 s4 -> s5
copy stage=0 -> stage=1: s5 => s6
run layer0_fwd[1]: s2 s7 s4 -> s8
copy stage=0 -> stage=1: s8 => s9
run layer1_fwd[0]: s6 s10 s11 -> s12
run layer1_bwd[0]: s6 s10 s1 -> s13 s14
copy stage=1 -> stage=0: s13 => s15
run layer0_bwd[0]: s15 s2 s3 s0 -> s16
run layer1_fwd[1]: s9 s10 s12 -> s17
copy stage=1 -> everywhere: s17 => s18
run layer1_bwd[1]: s9 s10 s14 -> s19 s20
copy stage=1 -> stage=0: s19 => s21
run layer0_bwd[1]: s21 s2 s7 s16 -> s22
run main: s22 -> s23
copy stage=0 -> stage=1: s23 => s24
run main: s20 s24 -> s25
copy stage=1 -> stage=0: s25 => s26
run main: s26 s22 s4 -> s27
run main: s25 s20 s10 -> s28
return s27 s28 s18\
""")


def test_fuse(texts: dict[str, str]) -> None:
    assert texts["fuse"] == snapshot("""\
input params[0] -> s4
input params[1] -> s10
input x -> s2 as 2 microbatches
constant index 0 -> s3
constant index 1 -> s7
constant literal -> s11
run main:  -> s0
run main:  -> s1
run layer0_fwd[0]: s2 s3 s4 -> s5
copy stage=0 -> stage=1: s5 => s6
run layer0_fwd[1]: s2 s7 s4 -> s8
copy stage=0 -> stage=1: s8 => s9
run layer1_fwd+layer1_bwd[0]: s6 s10 s11 s1 -> s12 s13 s14
copy stage=1 -> stage=0: s13 => s15
run layer0_bwd[0]: s15 s2 s3 s0 -> s16
run layer1_fwd+layer1_bwd[1]: s9 s10 s12 s14 -> s17 s19 s20
copy stage=1 -> everywhere: s17 => s18
copy stage=1 -> stage=0: s19 => s21
run layer0_bwd[1]: s21 s2 s7 s16 -> s22
run main: s22 -> s23
copy stage=0 -> stage=1: s23 => s24
run main: s20 s24 -> s25
copy stage=1 -> stage=0: s25 => s26
run main: s26 s22 s4 -> s27
run main: s25 s20 s10 -> s28
return s27 s28 s18\
""")


def test_every_observed_pass_has_a_test(texts: dict[str, str]) -> None:
    assert all(f"test_{name}" in globals() for name in texts)


PRINT = """
from jax_plugins.multimesh import init
init(cpus=8)
from tests.partition.programs import TRAIN_ARGS, cut, train, zeros
from tests.programs.plainly import pipeline, square_loss
import jax, optax
from multimesh._src.frontend.microbatching import microbatch

opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

def step(state, batch, key):
    params, rest = state
    loss = jax.checkpoint(square_loss)
    value, grads = microbatch(jax.value_and_grad(loss), 0, 2, argnum=1)(params, batch)
    updates, rest = opt.update(grads, rest, params)
    noise = [jax.random.normal(key, w.shape) for w in params]
    params = jax.tree.map(lambda *parts: sum(parts), params, updates, noise)
    return (params, rest), value

params = [zeros(8, 8)] * 5
state = (params, jax.eval_shape(opt.init, params))
batch = (zeros(8, 8), zeros(8, 8))
_, texts = cut(pipeline(4, 2), step, state, batch, jax.random.key(0))
for name, printed in texts.items():
    print(name, printed)
"""


def test_text_is_the_same_in_every_process() -> None:
    found = set()
    for seed in ("1", "2", "3"):
        process = subprocess.run(
            [sys.executable, "-c", PRINT],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        found.add(process.stdout)
    assert len(found) == 1
    assert len(found.pop().splitlines()) > 100
