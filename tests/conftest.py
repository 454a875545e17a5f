"""All tests run on eight CPU devices."""

from jax_plugins.multimesh import init

init(cpus=8)
