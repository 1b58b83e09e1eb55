"""Configuration of Sphinx; `make docs` runs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))
# What tutorials import from beside them, in the processes that run them.
TUTORIALS = str(HERE.parent / "tutorials")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [TUTORIALS, *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["MATPLOTLIBRC"] = TUTORIALS

import crossfuse  # noqa: E402 - the path above is for the extensions

project = "Crossfuse"
author = "the Crossfuse contributors"
copyright = author
release = version = crossfuse.__version__

extensions = [
    "crossfuse_site",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]

exclude_patterns = ["_build", "_ext", "conf.py", "**/.ipynb_checkpoints"]
html_theme = "furo"
html_title = f"Crossfuse {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

# A single backtick in a docstring is a link where the name is documented, and code elsewhere.
default_role = "py:obj"
nitpicky = True
# Types of other projects, and of ours that no page has, are shown as code.
nitpick_ignore_regex = [("py:.*", r".*")]

autodoc_typehints = "none"  # the docstrings say it, with shapes and units
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = False

# `make linkcheck`: without a network each link is told as broken after this many seconds.
linkcheck_timeout = 15
linkcheck_retries = 2

myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 4

# Tutorials are Python files in percent format. Each is run when it or the package has changed.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "jupyter-cache")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
