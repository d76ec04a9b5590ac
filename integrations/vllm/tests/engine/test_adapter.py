"""vLLM's released builders under `graphpact check`, with the specs, configurations and batches of the engine.

`make peers` checks them with stand-ins, from a wheel that is not installed; its known findings are the
verdicts here.
"""

import functools
import importlib
import subprocess
import sys
from typing import Any

import forked_child
import pytest
from engines import SECONDS
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from graphpact_adapters.vllm import Builders
from graphpact_conformance.results import Finding, Outcome
from graphpact_conformance.suite import examine_lane
from graphpact_conformance.targets import Options
from peers.job import Known
from peers.vllm_builders import BUILDERS
from peers.vllm_checks import CHECKS, KNOWN, Check, Released

_BACKENDS = "vllm.v1.attention.backends"
TRITON = f"{_BACKENDS}.triton_attn:TritonAttentionMetadataBuilder"
_OTHERS = ("triton", "flash_attention", "flex", "rocm", "rocm_segmented", "rocm_aiter_unified", "gdn")
NAMES = [
    *("turboquant", "triton_mla", "mamba2"),
    *(pytest.param(name, marks=pytest.mark.sweep) for name in (*_OTHERS, "triton_diffkv")),
]
"""Builders that load without a GPU's kernels, of each kind of KV cache, with findings and without."""


def _make(name: str, spec: Any, layer_names: list[str], config: Any, device: Any) -> Any:
    """Return a builder of a class in `BUILDERS`, and require that what it gets is of vLLM's own classes."""
    assert isinstance(spec, KVCacheSpec)
    assert isinstance(config, VllmConfig)
    module, _, cls = BUILDERS[name].path.partition(":")
    if (ready := BUILDERS[name].ready) is not None:
        ready(config)
    builder = getattr(importlib.import_module(f"{_BACKENDS}.{module}"), cls)(
        spec, layer_names, config, device
    )
    build = builder.build

    @functools.wraps(build)
    def checked(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        assert type(common_attn_metadata) is CommonAttentionMetadata
        return build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    builder.build = checked
    return builder


def _verdict(name: str) -> tuple[list[Finding], list[str], str]:
    """Return the findings of a quick check, the faults of the suite, and what the report says of classes."""
    check = CHECKS.get(name, Check())
    row = BUILDERS[name]
    checked = Released(
        functools.partial(_make, name),
        read=check.read,
        kind=row.kind,
        head_sizes={"mla": (576,), "mamba": None}.get(row.kind, (64,)),
        block_sizes={"mla": (64,)}.get(row.kind, (16,)),
        modes=check.modes,
        of_low_caches=check.of_low_caches,
    )
    options = Options(size="quick", shrink=False)
    results = [
        result
        for plan in checked.lanes(options)
        for result in examine_lane(plan, options, experiments=checked.experiments)
    ]
    assert sum(result.outcome is Outcome.PASS for result in results) > 20
    faults = [result.reason or "" for result in results if result.outcome is Outcome.ERROR]
    return [each for result in results for each in result.findings], faults, checked.not_shown[0]


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_are_those_of_make_peers(name: str) -> None:
    """With the engine's own classes a builder has the findings that it has with stand-ins, and no other."""
    environment = {"GRAPHPACT": "tape"}
    findings, faults, classes = forked_child.in_child(_verdict, name, environment=environment, seconds=900)
    assert faults == []
    assert "vLLM 0.32.0" in classes
    known: tuple[Known, ...] = KNOWN.get(name, ())
    assert [str(each) for each in findings if not any(every.explains(each) for every in known)] == []
    assert [every for every in known if not any(every.explains(each) for each in findings)] == []


def test_the_command_finds_the_installed_engine() -> None:
    """A class of vLLM is checked without a factory; the report says whose classes it got."""
    command = [sys.executable, "-m", "graphpact_cli", "check", "--adapter", "vllm", TRITON]
    done = subprocess.run(
        [*command, "--quick", "--lane", "target_verify-page16-gqa-float32", "--only", "GP19"],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS * 2,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "GP19" in done.stdout
    assert "lent by the engine" in done.stdout
    assert "what they get of vLLM 0.32.0" in done.stdout


def test_a_release_that_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release of vLLM is refused by name, before its classes are used."""
    from graphpact.errors import ConfigError
    from graphpact_adapters.vllm.values import installed_values

    monkeypatch.setattr("graphpact_vllm.version", lambda name: "0.31.0")
    installed_values.cache_clear()
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.0 is none of 0\.32\.0"):
        Builders.prepare()
    installed_values.cache_clear()
