"""Configuration of the documentation."""

from multimesh import __version__

project = "MultiMesh for JAX"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_rtype = False
default_role = "code"
exclude_patterns = ["_build"]
html_theme = "alabaster"
