"""The seams of SGLang: what the integration uses is there in every release that it supports."""

from pathlib import Path

import sglang
from engines import in_child
from releases import GUARD, TAPE, of_folder, recorded, signatures
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

from graphpact_sglang import RUN, SUPPORTED


def _targets() -> list[str]:
    """Return the targets of all hooks of guard and tape."""
    load_plugins()
    return sorted(HookRegistry._hooks)


def test_every_hook_has_a_recorded_seam() -> None:
    """What is hooked is among the seams whose signatures are compared."""
    targets = in_child(_targets, words="tape,guard,verify:1,start,record:steps.jsonl")
    assert len(targets) > 20
    assert {*targets} <= {*GUARD, *TAPE}


def test_the_installed_release_has_the_recorded_signatures() -> None:
    """The record is that of the release that runs here."""
    assert signatures(of_folder(Path(sglang.__file__).parents[1])) == recorded()[sglang.__version__]


def test_supported_releases_have_every_seam() -> None:
    """The guard's seams are in each supported release, the tape's in those on which the tape runs."""
    assert {*recorded()} == {*SUPPORTED}
    for release, found in recorded().items():
        missing = {seam for seam, signature in found.items() if signature is None}
        assert missing <= {*TAPE}
        assert not (release in RUN and missing)
