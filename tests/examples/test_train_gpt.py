"""The GPT trains, is compared with plain JAX, is evaluated and writes text."""

import json
import re

import pytest

from tests.examples.test_examples import run

SMALL = ["--layers", "2", "--width", "32", "--context", "16", "--batch", "16", "--steps", "6"]


@pytest.mark.parametrize(
    "flags",
    [
        "--check --explicit --schedule eager-1f1b",
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                "--tied --check",
                "--untied --dropout 0.1 --check --schedule gpipe",
                "--stages 4 --data 1 --model 2 --layers 4 --check",
                "--bf16 --dropout 0.1",
            )
        ),
    ],
)
def test_gpt_trains_as_plain_jax_does(flags: str) -> None:
    text = run("examples/train_gpt.py", *SMALL, *flags.split())
    if "--check" in flags:
        words = " ".join(text.split())
        assert "5 steps are within bounds of plain jax.jit" in words
        arrays, unclear = re.findall(r"of (\d+) arrays .* bit, (\d+) are too ill", words)[0]
        assert int(unclear) < 0.01 * int(arrays)
    assert "stage=0  0F0" in text and "stage=1" in text, "the grid"
    assert text.count("import o") == 2, "both samples begin with the prompt"
    losses = dict(re.findall(r"(held-out files|last 10 losses) +(\d\.\d+)", text))
    assert all(3.5 < float(loss) < 6.5 for loss in losses.values()) and len(losses) == 2


@pytest.mark.slow
def test_gpt_shows_a_timeline(tmp_path) -> None:
    path = tmp_path / "step.json"
    text = run("examples/train_gpt.py", *SMALL, "--timeline", str(path))
    for part in ("train_step: 5 calls of", "Submeshes (shares of", "Loop of `1f1b`", "What to"):
        assert part in text
    assert "block_0#2" in text, "the backward of a block"
    assert {"ph", "ts", "dur"} <= json.loads(path.read_text())["traceEvents"][0].keys()
