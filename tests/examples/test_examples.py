"""The examples run as a user runs them: each in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from multimesh.jax import checkpoint

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    flags = {"JAX_PLATFORMS", "XLA_FLAGS"}  # `init` in the example decides
    env = {name: value for name, value in os.environ.items() if name not in flags}
    return subprocess.Popen(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**env, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=300)
    finally:
        process.kill()


def run(*arguments: str) -> str:
    process = start(*arguments)
    out, err = finish(process)
    assert process.returncode == 0, out + err
    return out


def test_tutorial_shows_parameters_on_their_stages() -> None:
    text = run("examples/tutorial_mpmd.py")
    first, second = text.split("Param 2")
    rows = [line for line in first.splitlines() if "CPU" in line]
    assert ["CPU 0,2" in rows[0], "CPU 1,3" in rows[1], len(rows)] == [True, True, 2]
    columns = [line for line in second.splitlines() if "CPU" in line]
    assert len(columns) == 1
    assert columns[0].index("CPU 4,6") < columns[0].index("CPU 5,7")
    assert "equals plain jax.jit's" in second


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_digits_are_learnt_and_checked(schedule: str) -> None:
    text = run("examples/train_digits.py", "--schedule", schedule, "--check")
    assert "within bounds of plain jax.jit" in " ".join(text.split())
    assert "stage=0" in text and "stage=1" in text


@pytest.mark.slow
def test_digits_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    def arguments(name: str) -> tuple[str, ...]:
        return "examples/train_digits.py", "--checkpoint", str(tmp_path / name)

    process = start(*arguments("twice"))
    while process.poll() is None and not (tmp_path / "twice" / "20").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    stopped = re.search(r"stopped after step (\d+); the same command goes on", err)
    assert stopped is not None, err
    assert 20 <= int(stopped[1]) < 200
    assert "test accuracy" in run(*arguments("twice"))
    run(*arguments("once"))

    last = [restore_numpy(tmp_path / name / "200") for name in ("once", "twice")]
    assert len(last[0]) > 20
    assert last[0] == last[1], "equal bit for bit"


def restore_numpy(path: Path) -> list[bytes]:
    handler = ocp.StandardCheckpointHandler()
    tree = handler.metadata(path / "default").tree
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(checkpoint.restore(path, shapes))]


def test_quick_start_of_the_readme(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "quick_start.py"
    script.write_text(code[1])
    text = run(str(script))
    assert text.count("CpuDevice(id=0)") == text.count("CpuDevice(id=7)") == 2
