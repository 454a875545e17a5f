"""Runs the examples in docstrings, with the public names at hand."""

import doctest
import importlib

import pytest

import multimesh.jax

MODULES = (
    "config",
    "frontend.contexts",
    "frontend.multi_mesh",
    "frontend.tasks",
    "integrations.checkpoint",
    "integrations.wanted",
    "runtime.counters",
    "staging.measuring",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"multimesh._src.{name}")
    names = {public: getattr(multimesh.jax, public) for public in multimesh.jax.__all__}
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0
