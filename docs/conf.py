"""The settings of `make docs`: Sphinx builds a site of these pages, in the theme furo.

The pages are Markdown that is read as it is on a forge, so they have no directives. `index.md` is the only
page for the site alone.

Does not: read the code; `reference.py` writes what pages have from it.
"""

project = "graphpact"
author = "the graphpact authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "graphpact"
myst_heading_anchors = 4  # links to headings, as forges make them
exclude_patterns = ["_build"]
# Links to files of the repository that are no pages; tests/test_docs.py checks that the files are there.
suppress_warnings = ["myst.xref_missing"]
