"""The installed distributions of graphpact and of plugins, and which distribution to install for a plugin.

Does not: import a plugin; `graphpact_cli.survey` does.
"""

from contextlib import suppress

from importlib_metadata import PackageNotFoundError, distribution, distributions

from graphpact import __version__
from graphpact.errors import GraphpactError, UnknownPluginError, did_you_mean
from graphpact.plugins import Kind, PluginCatalog

FIRST_PARTY: dict[str, dict[str, tuple[str, ...]]] = {
    "graphpact": {"runner": ("eager",)},
    "graphpact-cli": {"command": ("plugins",)},
    "graphpact-kernels": {},
    "graphpact-tape": {"graph_driver": ("tape",)},
    "graphpact-cuda-graph": {
        "runner": ("cuda_graph", "breakable_cuda_graph", "piecewise_cuda_graph"),
        "graph_driver": ("cuda", "xpu", "npu", "musa"),
    },
    "graphpact-cpu-graph": {"runner": ("cpu_graph",), "graph_driver": ("inductor",)},
    "graphpact-speculative": {
        "runner": ("eagle_draft", "eagle_draft_extend", "frozen_kv_mtp"),
        "speculation": ("eagle", "frozen_kv_mtp"),
    },
    "graphpact-flashinfer": {"attention_backend": ("flashinfer",)},
    "graphpact-fa3": {"attention_backend": ("fa3",)},
    "graphpact-trtllm-mla": {"attention_backend": ("trtllm_mla",)},
    "graphpact-engine": {
        "engine": ("graphpact",),
        "observer": ("metrics", "trace"),
        "command": ("doctor", "generate", "pact"),
    },
    "graphpact-conformance": {"command": ("check", "explain", "report")},
    "graphpact-museum": {"command": ("museum",)},
    "graphpact-adapters": {"adapter": ("sglang", "vllm")},
    "graphpact-guard": {},
    "graphpact-sglang": {"command": ("sglang",), "engine": ("sglang",)},
    "graphpact-vllm": {"command": ("vllm",), "engine": ("vllm",)},
    "graphpact-swarm": {"command": ("swarm",)},
    "graphpact-scaffold": {"command": ("new",)},
    "graphpact-bench": {"command": ("bench",)},
}
"""The distributions of this repository, and the plugins of each by kind."""


def help_for(error: GraphpactError) -> str | None:
    """Return what to do about ``error``: its hint, or the pip command for a plugin that is not installed.

    A misspelt name of such a plugin gives the right name too.
    """
    if not isinstance(error, UnknownPluginError) or error.name is None:
        return error.hint
    offers = {name: owner for owner, kinds in FIRST_PARTY.items() for name in kinds.get(str(error.kind), ())}
    near = did_you_mean(error.name, offers)
    if near is None or _is_installed(offers[near]):
        return error.hint
    install = f"pip install {offers[near]}"
    return install if near == error.name else f"did you mean {near!r}? {install}"


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def installed_distributions() -> dict[str, tuple[str, str]]:
    """Return version and plugins of every distribution that has plugins, or a name like ``graphpact-tape``.

    Sorted by name, ``graphpact`` first. The plugins are descriptions, such as ``graph_driver tape``. They are
    read from metadata, so plugins that would be rejected are listed too.
    """
    versions: dict[str, str] = {}
    plugins: dict[str, dict[Kind, list[str]]] = {}
    for info in PluginCatalog.scan(env={}).infos():
        versions[info.distribution] = info.version
        plugins.setdefault(info.distribution, {}).setdefault(info.kind, []).append(info.name)
    for found in distributions():
        with suppress(Exception):  # metadata of a third party may be unreadable
            if found.name.startswith("graphpact-"):
                versions.setdefault(found.name, found.version)
    versions.pop("graphpact", None)
    in_order = {"graphpact": __version__, **dict(sorted(versions.items()))}
    return {
        name: (version, "; ".join(f"{k} {', '.join(names)}" for k, names in plugins.get(name, {}).items()))
        for name, version in in_order.items()
    }


def installed_versions() -> dict[str, str]:
    """Return the versions of `installed_distributions`, by name."""
    return {name: version for name, (version, _) in installed_distributions().items()}
