"""docs/explain.md: what it quotes is what its example prints, all of it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explain.md").read_text(encoding="utf-8")
EXAMPLE = DOCS / "explain_example.py"


@pytest.fixture(scope="module")
def printed() -> str:
    spec = importlib.util.spec_from_file_location("explain_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.explained())


def test_the_page_quotes_the_whole_text(printed):
    quoted = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert "\n\n".join(quoted) == printed


def test_the_code_of_the_page_is_that_of_the_example():
    _, registrations = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert registrations in EXAMPLE.read_text(encoding="utf-8")


def test_no_line_is_wider_than_a_page(printed):
    assert max(map(len, printed.splitlines())) <= 100


def test_the_text_is_the_same_in_another_process(printed):
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == printed
