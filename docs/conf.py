"""Configuration of the documentation."""

from multimesh import __version__

project = "MultiMesh for JAX"
release = __version__
extensions = ["myst_nb"]
nb_execution_mode = "off"
exclude_patterns = ["_build"]
html_theme = "alabaster"
