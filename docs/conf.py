"""The settings of `make docs`: Sphinx builds a site of these pages, in the theme furo.

The pages are plain Markdown without directives, because forges show them unprocessed. Only the
index pages are written for the site. The reference of public names, `docs/reference/api`, is written from the
source by sphinx-autodoc2 while the site is built; git ignores it.

Does not: import the code; `tools/reference.py` does, for the generated parts of the pages.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, f"{DOCS}/tools")  # for `docstrings`

project = "graphpact"
author = "the graphpact authors"
extensions = ["myst_parser", "autodoc2"]
html_theme = "furo"
html_title = "graphpact"
myst_heading_anchors = 4  # link targets of headings, equal to those of forges

_PACKAGES = [
    file.parent
    for at in ("*/*", "plugins/*/*", "integrations/*/*")
    for file in DOCS.parent.glob(f"{at}/__init__.py")
]
autodoc2_packages = [
    {"path": f"../{folder.relative_to(DOCS.parent)}", "auto_mode": True}
    for folder in sorted(_PACKAGES)
    if (folder.parent / "pyproject.toml").exists()
]
autodoc2_output_dir = "reference/api"
autodoc2_render_plugin = "docstrings.Renderer"
autodoc2_hidden_objects = ["private", "dunder", "inherited"]
autodoc2_skip_module_regexes = [r".*\._.*"]
autodoc2_docstring_parser_regexes = [(".*", "docstrings")]
autodoc2_index_template = """\
Reference
=========

Every public name, by distribution, read from the source.

.. toctree::
   :titlesonly:
{% for package in top_level %}
   {{ package }}
{%- endfor %}
"""

# Signatures link only to types in the reference. Other types and re-exported names have no target.
nitpick_ignore_regex = [("py:.*", ".*")]
suppress_warnings = [
    # Links to files of the repository that are not pages; tests/test_docs.py checks that they exist.
    "myst.xref_missing",
    # Types named without their module in a signature, where several attributes have the same name.
    "ref.python",
    # Functions called `_`, which register implementations.
    "autodoc2.dup_item",
]
