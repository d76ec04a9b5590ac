"""What `graphpact new` writes for vLLM is served by the real engine, which selects it by its name."""

from pathlib import Path

import pytest
from new_plugin import serve_new_plugin

from graphpact_scaffold.kinds import NewKind


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_a_new_plugin_serves(tmp_path: Path) -> None:
    """Its own tests pass, on the fast and on the strict tape: the eager tokens, and a silent guard."""
    assert "2 passed" in serve_new_plugin(NewKind.vllm_builder, tmp_path)
