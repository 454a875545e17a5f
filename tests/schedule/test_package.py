"""The schedule package is pure data, and its public names are complete."""

import doctest
import importlib
import subprocess
import sys

import pytest

from multimesh.jax import schedules

WITH_EXAMPLES = (
    "auto",
    "before",
    "check",
    "compare",
    "costs",
    "custom",
    "grid",
    "make",
    "schedule",
    "simulate",
)

CODE = """
import importlib, pkgutil, sys
import multimesh._src.schedule as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({"jax", "jaxlib", "numpy", "rich", "multimesh._src.ir"} & set(sys.modules)))
"""


def test_importing_it_imports_neither_jax_nor_numpy_nor_rich():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    module = importlib.import_module(f"multimesh._src.schedule.{name}")
    names = {public: getattr(schedules, public) for public in schedules.__all__}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0


def test_rules_can_be_keys():
    rules = [
        schedules.zb_v,
        schedules.wavefront,
        schedules.custom("0F0"),
        schedules.before(min),
        schedules.auto(latency={("0F", "1F"): 1.0}),
    ]
    assert len({*rules, schedules.auto(latency={("0F", "1F"): 1.0})}) == len(rules)
    assert repr(schedules.zb_v) == "<schedule zb-v>"


def test_public_names():
    assert schedules.__all__ == sorted(schedules.__all__)
    assert all(hasattr(schedules, name) for name in schedules.__all__)


def test_built_in_rules_by_their_public_names():
    names = {
        "gpipe": "gpipe",
        "one_f_one_b": "1f1b",
        "eager_1f1b": "eager-1f1b",
        "interleaved_1f1b": "interleaved-1f1b",
        "looped_bfs": "looped-bfs",
        "zb_h1": "zb-h1",
        "zb_h2": "zb-h2",
        "zb_v": "zb-v",
        "dualpipe_v": "dualpipe-v",
    }
    for public, name in names.items():
        rule = getattr(schedules, public)
        size = {"num_ranks": 2, "num_microbatches": 4}
        assert schedules.make_schedule(rule, **size) == schedules.make_schedule(name, **size)
