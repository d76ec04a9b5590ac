"""The reference says what the code says."""

import importlib.util
import re
import tomllib
from pathlib import Path

from graphpact.config import RESERVED_VARIABLES, EngineConfig, config_keys

ROOT = Path(__file__).parents[1]


def test_the_configuration_page_is_what_the_code_would_write() -> None:
    """docs/configuration.md is up to date: `python docs/reference.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == reference.configuration()
    assert all(f"`{key.name.rpartition('.')[2]}`" in page for key in config_keys())
    assert all(f"`{variable}`" in page for variable in RESERVED_VARIABLES)


def test_links_in_the_texts_lead_somewhere() -> None:
    """Every relative link of the README and the docs is a file that is there."""
    for text in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text.read_text(encoding="utf-8")):
            assert (text.parent / target).exists(), f"{text.name}: {target}"


def test_the_keys_that_the_readme_shows_exist() -> None:
    """Every key in the README's example configuration is a key, with a value that it takes."""
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        EngineConfig.model_validate(tomllib.loads(block))
