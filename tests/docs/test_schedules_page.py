"""docs/schedules.md: its table is what its script writes, and it names every schedule."""

import subprocess
import sys
from pathlib import Path

import pytest

from multimesh.jax import schedules

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text(encoding="utf-8")


def test_the_page_names_every_schedule():
    missing = [
        name
        for name in schedules.schedule_names()
        if f"`{name}`" not in PAGE and f'"{name}"' not in PAGE
    ]
    assert not missing


@pytest.mark.slow
def test_the_table_is_current():
    command = [sys.executable, str(DOCS / "make_schedules_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
