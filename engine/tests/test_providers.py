"""Tests of kernel providers in engines: refusals, warnings, and the backends that would fit instead."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from importlib_metadata import EntryPoint

from graphpact.attention import (
    AttentionBackend,
    BackendContext,
    Capabilities,
    GraphSupport,
    HeadLayout,
    KernelProvider,
    LayerSpec,
    Limits,
)
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.buffers import GraphSlot
from graphpact.errors import ConfigError, PluginError
from graphpact.plugins import Kind, PluginCatalog, PluginInfo
from graphpact.shapes import GraphShape
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.capabilities import require_capabilities
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import UnsupportedModelError
from support import Catalog

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
NOWHERE = Path("nowhere")  # reading it would be a CheckpointError
LAYER = LayerSpec(0, 4, 2, 16, 16, 0.25)
NO_GPU = "it runs on a GPU"


class Portable(KernelProvider):
    """A provider of kernels for every device."""

    name = "portable"


class Native(KernelProvider):
    """A provider of kernels that are available on no device."""

    name = "native"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason."""
        del device
        return NO_GPU


class Plain(AttentionBackend):
    """A backend without metadata; its attention is zeros."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        modes=frozenset({ForwardMode.DECODE, ForwardMode.EXTEND}),
        graph_support=GraphSupport.UNIFORM_DECODE,
        dtypes=frozenset({torch.float32}),
        devices=frozenset({"cpu"}),
        head_layouts=frozenset({HeadLayout.MHA, HeadLayout.GQA}),
        seq_len_fill_value=1,
    )

    def declare_slots(self, limits: Limits) -> Sequence[GraphSlot]:
        """Return no slot."""
        return []

    def allocate_metadata(
        self, view: ForwardBatch, shape: GraphShape, buffers: Callable[[str], torch.Tensor]
    ) -> tuple[()]:
        """Return empty metadata."""
        return ()

    def fill_metadata(self, view: ForwardBatch, metadata: Any) -> None:
        """Fill nothing."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerSpec, metadata: Any
    ) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros_like(q)


class Both(Plain):
    """A backend whose native kernels cannot run here, and whose portable ones can."""

    providers = (Native, Portable)


class OnlyNative(Plain):
    """A backend with native kernels only, which cannot run here."""

    providers = (Native,)


class NoExtend(Plain):
    """A backend for decode only."""

    capabilities = replace(Plain.capabilities, modes=frozenset({ForwardMode.DECODE}))


class NoGraphs(Plain):
    """A backend without graph support."""

    capabilities = replace(Plain.capabilities, graph_support=GraphSupport.NEVER)


class NoDecode(Plain):
    """A backend for extend only."""

    capabilities = replace(Plain.capabilities, modes=frozenset({ForwardMode.EXTEND}))


class LargePages(Plain):
    """A backend for large pages only."""

    capabilities = replace(Plain.capabilities, page_sizes=frozenset({128, 32, 64}))


class HalfOnly(Plain):
    """A backend for half precision only."""

    capabilities = replace(Plain.capabilities, dtypes=frozenset({torch.float16}))


class NoHeadGroups(Plain):
    """A backend without GQA."""

    capabilities = replace(Plain.capabilities, head_layouts=frozenset({HeadLayout.MHA}))


class OnGpu(Plain):
    """A backend for another device."""

    capabilities = replace(Plain.capabilities, devices=frozenset({"cuda"}))


class Unreadable(Plain):
    """A backend with a provider of a wrong type."""

    providers = (int,)  # type: ignore[assignment]


def configure(path: Path, *overrides: str) -> EngineConfig:
    """Return a configuration for a small engine on a CPU."""
    given = [f'model.path="{path}"', "engine.device=cpu", "engine.max_num_seqs=2", *overrides]
    return EngineConfig.load(None, env={}, overrides=given)


def installed(**backends: type[AttentionBackend] | str) -> PluginCatalog:
    """Return a real catalog of backends, as classes of this file or targets, and of our other plugins."""
    offers: dict[Kind, dict[str, str]] = {
        "attention_backend": {
            name: backend if isinstance(backend, str) else f"{__name__}:{backend.__name__}"
            for name, backend in backends.items()
        },
        "runner": {
            "eager": "graphpact.runners:EagerRunner",
            "cuda_graph": "graphpact_cuda_graph:CudaGraphRunner",
        },
        "graph_driver": {"tape": "graphpact_tape.tape:TapeDriver"},
    }
    return PluginCatalog(
        {
            PluginInfo(kind, name, "test", "1.0", target, "1"): EntryPoint(name, target, f"graphpact.{kind}s")
            for kind, names in offers.items()
            for name, target in names.items()
        }
    )


def build(config: EngineConfig, **backends: type[AttentionBackend]) -> Engine:
    """Build an engine with backends by name, generate two tokens, and close it."""
    with Engine(config, catalog=Catalog(**backends)) as engine:
        engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    return engine


# -- through the engine --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"decode": "auto", "extend": "auto"}),
        (["engine.kernel_provider=portable"], {"decode": "portable", "extend": "portable"}),
        (["lanes.prefill.kernel_provider=portable"], {"decode": "auto", "extend": "portable"}),
        (
            ["engine.kernel_provider=portable", "lanes.decode.kernel_provider=auto"],
            {"decode": "auto", "extend": "portable"},
        ),
    ],
)
def test_each_lane_and_its_verifier_get_what_is_configured(
    overrides: list[str], expected: dict[str, str]
) -> None:
    """A lane's key overrides the engine's; the second backend of a verified lane gets the same."""
    built: list[BackendContext] = []

    class Told(Both):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            assert isinstance(self.kernels, Portable)
            built.append(context)

    config = configure(TINY, "engine.attention_backend=told", "verify.replay_against_eager=1", *overrides)
    engine = build(config, told=Told)
    assert engine.lanes[0].stats.replays
    assert [c.mode.value for c in built].count("decode") == 2
    assert {c.mode.value: c.provider for c in built} == expected
    assert len({(c.mode, c.provider) for c in built}) == 2


REFUSED = (
    "\"native\", but attention backend 'acme' has no native kernels that can be used on cpu: "
    f'{NO_GPU}\n  help: kernel_provider = "auto" takes what can run here;'
)


@pytest.mark.parametrize(
    ("backend", "overrides", "says"),
    [
        (
            Both,
            ["engine.kernel_provider=native"],
            f"lanes.decode: engine.kernel_provider = {REFUSED}",
        ),
        (
            Both,
            ["lanes.prefill.kernel_provider=native"],
            f"lanes.prefill.kernel_provider = {REFUSED}",
        ),
        (
            OnlyNative,
            ["engine.kernel_provider=portable"],
            "'acme' has no portable kernels: it has native\n",
        ),
        (
            Plain,
            ["lanes.decode.kernel_provider=portable"],
            "'acme' has no portable kernels: it offers no choice\n",
        ),
        (
            OnlyNative,
            [],
            f"'acme' has no kernels that can be used on cpu: native: {NO_GPU}\n  help: select another",
        ),
    ],
)
def test_kernels_that_cannot_run_here_are_refused_before_a_weight_is_read(
    backend: type[AttentionBackend], overrides: list[str], says: str
) -> None:
    """The refusal names lane, key, backend, provider, reason and help, and comes before the model is read."""
    config = configure(NOWHERE, "engine.attention_backend=acme", *overrides)
    with pytest.raises(ConfigError) as refused:
        Engine(config, catalog=Catalog(acme=backend))
    assert says in str(refused.value)


def test_a_provider_that_raises_is_reported_as_the_plugin_s() -> None:
    """A provider of a wrong type is an error that names the plugin."""
    config = configure(NOWHERE, "engine.attention_backend=acme")
    with pytest.raises(PluginError, match=r"attention_backend 'acme' .*AttributeError"):
        Engine(config, catalog=Catalog(acme=Unreadable))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("lanes.prefill.kernel_provider=native", 'lanes.prefill.kernel_provider = "native", but'),
        ("engine.kernel_provider=native", 'lanes.prefill: engine.kernel_provider = "native", but'),
    ],
)
def test_kernels_that_cannot_run_the_model_are_refused_before_any_capture(override: str, says: str) -> None:
    """A named provider without the lane's mode is refused by lane and key; no lane was captured."""

    class DecodeOnly(Portable):
        name = "native"
        capabilities = NoExtend.capabilities

    class Acme(Plain):
        providers = (DecodeOnly, Portable)

    captured: list[object] = []
    config = configure(TINY, "engine.attention_backend=acme", override)
    with pytest.raises(ConfigError) as refused:
        Engine(config, catalog=Catalog(acme=Acme), on_capture=lambda *told: captured.append(told))
    assert refused.value.message.startswith(f"{says} attention backend 'acme' has no native kernels")
    assert refused.value.message.endswith("they lack mode extend (has decode)")
    assert captured == []


# -- warnings --------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["engine.attention_backend=one"],
            [f"attention backend 'one' runs portable kernels; native: {NO_GPU}"],
        ),
        (
            ["lanes.decode.attention_backend=one", "lanes.prefill.attention_backend=two"],
            [
                f"attention backend 'one' runs portable kernels; native: {NO_GPU}",
                f"attention backend 'two' runs portable kernels; native: {NO_GPU}",
            ],
        ),
        (["engine.attention_backend=one", "engine.kernel_provider=portable"], []),
        (["engine.attention_backend=plain"], []),
    ],
)
def test_what_is_passed_over_is_said_once(
    overrides: list[str], expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each engine warns once for each backend and reason, whatever its number of lanes and verifiers."""
    config = configure(TINY, "verify.replay_against_eager=1", *overrides)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            build(config, one=Both, two=Both, plain=Plain)
        assert [r.getMessage() for r in caplog.records if r.name.startswith("graphpact")] == expected
        assert {r.levelname for r in caplog.records} <= {"WARNING"}


@pytest.mark.sweep
def test_generate_says_it_on_stderr_and_keeps_its_data_clean(tmp_path: Path) -> None:
    """In a new process stderr has the warning once, besides the plugin's own output; stdout is the JSON."""
    (tmp_path / "acme_kernels.py").write_text(
        "from graphpact.attention import KernelProvider\n"
        "from graphpact_flashinfer import FlashInferBackend\n"
        "class Native(KernelProvider):\n"
        "    name = 'native'\n"
        "    @classmethod\n"
        "    def unavailable(cls, device):\n"
        "        print('[noise]')\n"
        "        raise ImportError(f'libacme.so\\nis not for {device}')\n"
        "class Portable(KernelProvider):\n"
        "    name = 'portable'\n"
        "ours = [each for each in FlashInferBackend.providers if each.name == 'portable']\n"
        "class Acme(FlashInferBackend):\n"
        "    providers = (Native, *(ours or [Portable]))\n"
    )
    info = tmp_path / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[graphpact.contract]\n1 = x:y\n[graphpact.attention_backends]\nacme = acme_kernels:Acme\n"
    )
    command = [sys.executable, "-m", "graphpact_cli", "generate", "-q", "--json", "-n", "2", "If "]
    sets = [f"model.path={TINY}", "engine.device=cpu", "engine.attention_backend=acme"]
    done = subprocess.run(
        [*command, *(word for each in sets for word in ("--set", each))],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "If "
    said = [line for line in done.stderr.splitlines() if line != "[noise]"]
    reason = "native: ImportError: libacme.so is not for cpu"
    assert said == [f"attention backend 'acme' runs portable kernels; {reason}"]


# -- backends that would fit -----------------------------------------------------------------------

OTHERS: dict[str, type[AttentionBackend] | str] = {
    "broken": "a_module_that_nobody_has:Backend",
    "both": Both,
    "half_only": HalfOnly,
    "large_pages": LargePages,
    "no_decode": NoDecode,
    "no_extend": NoExtend,
    "no_graphs": NoGraphs,
    "no_graphs_2": NoGraphs,
    "no_head_groups": NoHeadGroups,
    "on_gpu": OnGpu,
    "only_native": OnlyNative,
    "plain": Plain,
    "unreadable": Unreadable,
}


@pytest.mark.parametrize(
    ("selected", "overrides", "lacks", "would_do"),
    [
        (
            "large_pages",
            [],
            "decode: it lacks page size 16 (has 32, 64, 128)",
            "both, no_extend, plain",
        ),
        ("half_only", [], "decode: it lacks dtype", "both, no_extend, plain"),
        ("on_gpu", [], "decode: it lacks device cpu (has cuda)", "both, no_extend, plain"),
        (
            "no_extend",
            [],
            "extend: it lacks mode extend (has decode)",
            "both, no_decode, no_graphs, no_graphs_2, plain",
        ),
        (
            "no_head_groups",
            ["lanes.decode.runner=eager"],
            "decode: it lacks head layout gqa (has mha)",
            "both, no_extend, no_graphs, no_graphs_2, plain",
        ),
        (
            "large_pages",
            ["engine.page_size=128", "lanes.prefill.attention_backend=half_only"],
            "extend: it lacks dtype",
            "both, large_pages, no_decode, no_graphs, no_graphs_2, plain",
        ),
        (
            "both",
            [
                "engine.kernel_provider=portable",
                "lanes.prefill.attention_backend=both",
                "model.dtype=float64",
            ],
            "decode: it lacks dtype torch.float64 (has torch.float32)",
            None,
        ),
    ],
)
def test_the_error_for_an_unsupported_model_names_backends_that_run_it(
    selected: str, overrides: list[str], lacks: str, would_do: str | None
) -> None:
    """The refusal lists, by name, exactly the installed backends that fit that lane."""
    config = configure(TINY, f"engine.attention_backend={selected}", *overrides)
    captured: list[object] = []
    with pytest.raises(UnsupportedModelError) as refused:
        Engine(config, catalog=installed(**OTHERS), on_capture=lambda *t: captured.append(t))
    message = refused.value.message
    assert lacks in message
    if would_do is None:
        assert message.endswith("; no other installed attention backend fits")
        assert "install an attention backend" in str(refused.value.hint)
    else:
        assert message.endswith(f"; attention backends that fit: {would_do}")
        inherits = "lanes.prefill.attention_backend=half_only" not in overrides
        key = "engine.attention_backend" if inherits else "lanes.prefill.attention_backend"
        assert f"select another {key}" in str(refused.value.hint)
    assert captured == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["engine.attention_backend=no_extend"], ['lanes.decode.attention_backend = "no_extend"']),
        (["engine.attention_backend=no_decode"], ['lanes.prefill.attention_backend = "no_decode"']),
        (
            [
                *("engine.attention_backend=no_extend", 'lanes.few.mode="decode"'),
                *("lanes.few.batch_sizes=[1]", "lanes.decode.batch_sizes=[2]"),
            ],
            [f'lanes.{name}.attention_backend = "no_extend"' for name in ("few", "decode")],
        ),
        (["engine.attention_backend=no_graphs"], ["lanes.decode.capture = false"]),
        (
            ["engine.attention_backend=plain", "lanes.decode.attention_backend=no_graphs"],
            ["lanes.decode.capture = false"],
        ),
        (["engine.attention_backend=large_pages"], ["engine.page_size = 32"]),
    ],
)
def test_what_a_help_says_to_set_can_be_set_and_ends_the_refusal(
    overrides: list[str], settings: list[str]
) -> None:
    """Each setting in the help of a refused backend is a key that this engine reads: with it the engine runs.

    A backend that serves one lane keeps it; ``engine.attention_backend`` is given to another one.
    """
    catalog = installed(**OTHERS)
    with pytest.raises((ConfigError, UnsupportedModelError)) as refused:
        Engine(configure(TINY, *overrides), catalog=catalog)
    hint = str(refused.value.hint)
    told = re.findall(r'[a-z]+\.[\w.]+ = (?:"\w+"|\w+)', hint)
    assert told == settings, hint
    done = [*overrides, *(each.replace(" = ", "=") for each in told)]
    if "select another engine.attention_backend for the other lanes" in hint:
        done.append("engine.attention_backend=plain")
    with Engine(configure(TINY, *done), catalog=catalog) as engine:
        assert engine.lanes


@pytest.mark.parametrize(
    ("overrides", "would_do"),
    [
        ([], "both, half_only, large_pages, no_extend, no_head_groups, only_acme, plain"),
        (["lanes.decode.kernel_provider=portable"], "both"),
        (["lanes.decode.kernel_provider=native"], "only_acme"),
    ],
)
def test_the_error_for_a_backend_without_graphs_names_others(overrides: list[str], would_do: str) -> None:
    """Before a model is read, the refusal lists the backends with the mode, device, kernels and graphs."""
    config = configure(NOWHERE, "engine.attention_backend=no_graphs", *overrides)
    with pytest.raises(ConfigError, match=r"captures uniform_decode batches.* is never; ") as refused:
        Engine(config, catalog=installed(**OTHERS, only_acme=NativeEverywhere))
    assert refused.value.message.endswith(f"; attention backends that fit: {would_do}")


class Everywhere(Portable):
    """A provider of native kernels that run here."""

    name = "native"


class NativeEverywhere(Plain):
    """A backend with native kernels only, which run here."""

    providers = (Everywhere,)


def test_where_only_the_page_size_is_missing_the_sizes_are_the_hint() -> None:
    """The hint lists the supported page sizes in order, and only if nothing else is missing."""

    def refusal(layer: LayerSpec) -> str:
        with pytest.raises(UnsupportedModelError) as refused:
            require_capabilities(
                "acme",
                LargePages.capabilities,
                [layer],
                mode=ForwardMode.DECODE,
                dtype=torch.float32,
                device=CPU,
                page_size=16,
            )
        return str(refused.value)

    assert "help: set engine.page_size = 32 or 64 or 128, or select another" in refusal(LAYER)
    assert "set engine.page_size" not in refusal(replace(LAYER, softcap=1.0))


def test_branches_count_among_what_is_missing() -> None:
    """Drafts with top-k > 1 are refused for a backend without trees, and accepted for one with trees."""

    def require(can: Capabilities) -> None:
        require_capabilities(
            "acme",
            can,
            [LAYER],
            mode=ForwardMode.DECODE,
            dtype=torch.float32,
            device=CPU,
            page_size=16,
            topk=4,
        )

    with pytest.raises(UnsupportedModelError, match="drafts with top-k 4"):
        require(Plain.capabilities)
    require(replace(Plain.capabilities, trees=True))
