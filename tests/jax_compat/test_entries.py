"""The list of private names is complete."""

import re
from pathlib import Path

from multimesh._src import jax_compat

_PRIVATE = re.compile(r"^\s*(from|import) (jax\._src|jaxlib)", re.MULTILINE)


def test_every_file_that_uses_private_names_is_listed():
    files = Path(jax_compat.__file__).parent.glob("*.py")
    found = {path.name for path in files if _PRIVATE.search(path.read_text())}
    assert found <= {entry.file for entry in jax_compat.ENTRIES}


def test_every_listed_file_exists_and_says_what_it_was_checked_on():
    folder = Path(jax_compat.__file__).parent
    for entry in jax_compat.ENTRIES:
        text = (folder / entry.file).read_text()
        assert all(version in text for version in entry.versions), entry.file
