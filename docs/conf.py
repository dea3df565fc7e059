"""The docs site: Sphinx reads the pages where they are, so that links work here as on GitHub.

``make docs`` builds it, with every warning as an error. The source folder is the root of the
repository, because README, ARCHITECTURE and others are pages of it, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from torchft_svc.version import VERSION  # noqa: E402

project = "torchft_svc"
version = release = VERSION
copyright = "the authors of torchft_svc"  # noqa: A001
root_doc = "docs/index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
include_patterns = ["docs/**", "*.md"]
# Only these folders are looked into.
exclude_patterns = [
    ".*",
    "build",
    "examples",
    "proto",
    "results",
    "shared",
    "tests",
    "tools",
    "torchft_svc*",
    "**/__pycache__",
]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3
# A block without a language is output.
highlight_language = "none"

# In docstrings, what is in single backticks is a name of the package where there is such a name.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "torchft_svc"
html_static_path = ["_site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}


# What a browser fetches by itself.
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["'](https?:[^"']*)""")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-bases", _drop_object)
    app.connect("build-finished", _finish)


def _drop_object(app: Sphinx, name: str, owner: type, options: object, bases: list[type]) -> None:
    """Leave out the base that every class has."""
    if bases == [object]:
        bases.clear()


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Lead from the top of the site to its first page, and check that it needs no network."""
    if error is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (site / "index.html").write_text(f"{page}\n", encoding="utf-8")
    for file in site.rglob("*.html"):
        loaded = _LOADED.search(file.read_text(encoding="utf-8"))
        if loaded:
            raise ExtensionError(f"{file} loads {loaded[1]}: the site has to work offline")
