"""The examples run as a user runs them: each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    flags = {"JAX_PLATFORMS", "XLA_FLAGS"}  # `init` in the example decides
    env = {name: value for name, value in os.environ.items() if name not in flags}
    process = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**env, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


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


def test_quick_start_of_the_readme(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "quick_start.py"
    script.write_text(code[1])
    text = run(str(script))
    assert text.count("CpuDevice(id=0)") == text.count("CpuDevice(id=7)") == 2
