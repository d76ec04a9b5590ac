"""The settings of `make docs`: Sphinx builds a site of these pages, in the theme furo.

The pages are Markdown that is read as it is on a forge, so they have no directives. `index.md` is the only
page for the site alone. The reference of all public names, `docs/reference`, is written from the source by
sphinx-autodoc2 while the site is built; git ignores it.

Does not: import the code. `reference.py` writes what other pages have from it.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, f"{DOCS}")  # for `docstrings`

project = "graphpact"
author = "the graphpact authors"
extensions = ["myst_parser", "autodoc2"]
html_theme = "furo"
html_title = "graphpact"
myst_heading_anchors = 4  # links to headings, as forges make them

_PACKAGES = [file.parent for at in ("*/*", "plugins/*/*") for file in DOCS.parent.glob(f"{at}/__init__.py")]
autodoc2_packages = [
    {"path": f"../{folder.relative_to(DOCS.parent)}", "auto_mode": True}
    for folder in sorted(_PACKAGES)
    if (folder.parent / "pyproject.toml").exists()
]
autodoc2_output_dir = "reference"
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

# Types in signatures link to what the reference has. The others, and names at a second place, have no target.
nitpick_ignore_regex = [("py:.*", ".*")]
suppress_warnings = [
    # Links to files of the repository that are no pages; tests/test_docs.py checks that the files are there.
    "myst.xref_missing",
    # Types that a signature names without their module, where several attributes have that name.
    "ref.python",
    # Functions called `_`, which register implementations.
    "autodoc2.dup_item",
]
