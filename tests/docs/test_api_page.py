"""The API page names everything that is public."""

import re
from pathlib import Path

import multimesh.jax

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_every_public_name_has_an_entry():
    listed = set(re.findall(r"auto(?:function|class):: (\w+)", PAGE.read_text()))
    assert set(multimesh.jax.__all__) - {"__version__"} <= listed
    assert all(hasattr(multimesh.jax, name) for name in listed - {"Traced", "Lowered", "Compiled"})
