"""`MULTIMESH_DUMP`: the text of every phase in files."""

import jax
import numpy as np
import pytest

from multimesh._src.errors import ConfigError
from multimesh._src.partition import text
from multimesh.jax import mjit
from tests.staging import models

PASSES = ["inline", "simplify_loops", "split_stacks", "assign", "split", "emit", "fuse", "explain"]


def double(w, x):
    with jax.named_scope("layer0"):
        return x @ w


def lower(fun=double):
    with models.make_multi_mesh():
        return mjit(fun).lower(np.ones((8, 8), np.float32), np.ones((4, 8), np.float32))


def test_every_pass_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path / "new"))
    lowered = lower()
    folder = tmp_path / "new" / "0_double"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"{number}_{name}.txt" for number, name in enumerate(PASSES)]
    assert (folder / "4_split.txt").read_text() == lowered.as_text() + "\n"
    assert (folder / "7_explain.txt").read_text() == f"{lowered.explain()}\n"
    assert "run 0f" in (folder / "5_emit.txt").read_text()


def test_functions_are_numbered(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path))
    lower()
    lower(lambda w, x: double(w, x))
    lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0_double", "1_lambda", "2_double"]


def test_all_passes_add_the_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path))
    monkeypatch.setenv("MULTIMESH_DUMP_ALL_PASSES", "1")
    lower()
    program = (tmp_path / "0_double" / "programs" / "0f.stablehlo.txt").read_text()
    assert "stablehlo.dot_general" in program


def test_nothing_is_printed_when_nobody_asks(monkeypatch):
    def fail(*_):
        raise AssertionError("printed")

    monkeypatch.delenv("MULTIMESH_DUMP", raising=False)
    for name in ("print_flat", "print_program", "print_plan"):
        monkeypatch.setattr(text, name, fail)
    lower()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTIMESH_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="MULTIMESH_DUMP"):
        lower()
