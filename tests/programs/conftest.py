"""Families of programs: `make test` runs the first test of each file, `make test-programs` all.

Random programs (`test_fuzz.py`) are no family.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

_NO_FAMILIES = ("test_fuzz.py", "test_generator.py")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks every test of this folder beside the first of its file, those marked `core` aside."""
    seen: set[Path] = set()
    for item in items:
        path = item.path
        if path.parent != Path(__file__).parent or path.name in _NO_FAMILIES:
            continue
        is_slow = item.get_closest_marker("slow") is not None
        if path in seen and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.family)
        elif not is_slow:
            seen.add(path)
