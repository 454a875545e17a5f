"""All tests run on eight CPU devices. Where CI runs them, hypothesis draws the same every time."""

import os

from hypothesis import settings

from jax_plugins.multimesh import init

init(cpus=8)

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
