"""The settings of `make docs`: Sphinx builds a site of these pages, in the theme furo.

The pages are plain Markdown without directives, because forges show them unprocessed. Only the index pages
are written for the site. The reference of names, `docs/reference/api`, is written from the source by
sphinx-autodoc2 while the site is built; git ignores it. It has the modules that plugins and engines import,
`PUBLIC`; the others are read in the source.

Does not: import the code; `tools/reference.py` does, for the generated parts of the pages.
"""

import gc
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, f"{DOCS}/tools")  # for `docstrings`
gc.disable()  # a build frees nearly nothing before its end, and collections took a quarter of the time

project = "graphpact"
author = "the graphpact authors"
extensions = ["myst_parser", "autodoc2"]
exclude_patterns = ["tools"]
html_theme = "furo"
html_title = "graphpact"
myst_heading_anchors = 4  # link targets of headings, equal to those of forges

PUBLIC = {
    "core/graphpact": (),
    "kernels/graphpact_kernels": (),
    "plugins/tape/graphpact_tape": (
        *("tape", "recorder", "strict", "strict_observer", "host_guard", "host_tensors", "nodes", "poison"),
        *("trace", "tasks"),
    ),
    "engine/graphpact_engine": (
        *("engine", "request", "deltas", "prompts", "config", "errors", "metrics", "timeline", "phases"),
        *("logs", "verify", "memory", "saved_pacts"),
    ),
    "conformance/graphpact_conformance": (
        *("rules", "real_bugs", "results", "targets", "testing", "suite", "lane", "driver_contract"),
    ),
    "adapters/graphpact_adapters": (*("vllm", "sglang", "kernel_reads", "recurrent", "tasks", "stand_ins"),),
    "guard/graphpact_guard": (),
}
"""The packages of the reference, and the modules of each that are in it; without names all of them."""

autodoc2_packages = [{"path": f"../{path}", "auto_mode": True} for path in PUBLIC]
autodoc2_output_dir = "reference/api"
autodoc2_render_plugin = "docstrings.Renderer"
autodoc2_hidden_objects = ["private", "dunder", "inherited"]
autodoc2_skip_module_regexes = [
    r".*\._.*",
    *(
        rf"{Path(path).name}\.(?!(?:{'|'.join(modules)})(?:\.|$)).*"
        for path, modules in PUBLIC.items()
        if modules
    ),
]
autodoc2_docstring_parser_regexes = [(".*", "docstrings")]
# Not in the tree of the sections: furo writes that tree into every page, which took most of the time.
autodoc2_index_template = """\
:orphan:

Names
=====

The public names that plugins and engines import, by package, read from the source.

.. toctree::
   :titlesonly:
{% for package in top_level %}
   {{ package }}
{%- endfor %}
"""

# Signatures link only to types in the reference. Other types and re-exported names have no target.
nitpick_ignore_regex = [("py:.*", ".*")]
suppress_warnings = [
    # Types named without their module in a signature, where several attributes have the same name.
    "ref.python",
    # Functions called `_`, which register implementations.
    "autodoc2.dup_item",
]

_REPOSITORY = "https://github.com/graphpact/graphpact/blob/main"
_LINK = re.compile(r"\]\((\.\./[^)#]+)(#[^)]+)?\)")


def setup(app: Any) -> None:
    """Have links to files of the repository lead there. The build checks the others, and tests check all."""
    app.connect("source-read", _link_to_repository)


def _link_to_repository(app: Any, name: str, source: list[str]) -> None:
    """Replace links that leave the folder of the pages."""
    folder = Path(app.env.doc2path(name)).parent

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if DOCS in target.parents:
            return link[0]
        return f"]({_REPOSITORY}/{target.relative_to(DOCS.parent)}{link[2] or ''})"

    source[0] = _LINK.sub(replaced, source[0])
