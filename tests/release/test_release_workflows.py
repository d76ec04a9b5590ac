"""Tests of the files that a forge reads: workflows, and forms of issues."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def parsed(file: Path) -> Any:
    """Return the contents of a YAML file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def steps(workflow: Any) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(workflow: Any) -> list[str]:
    """Return the lines that the jobs of a workflow run, each with every value of its matrix."""
    lines = []
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            found = [step["run"]] if "run" in step else []
            for name, values in matrix.items():
                if isinstance(values, list):
                    each = f"${{{{ matrix.{name} }}}}"
                    found = [line.replace(each, str(value)) for line in found for value in values]
            lines += [line for text in found for line in text.splitlines()]
    return lines


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_is_there(file: Path) -> None:
    """Every ``make`` names targets that exist, every ``python`` a script, every ``needs`` a job."""
    workflow = parsed(file)
    lines = [line.split() for line in commands(workflow)]
    made = [word for line in lines if line[0] == "make" for word in line[1:] if "=" not in word]
    assert made
    assert set(made) <= TARGETS
    scripts = [line[1] for line in lines if line[0] == "python"]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= workflow["jobs"].keys()


def test_ci_runs_the_checks_and_the_commands_of_the_readme() -> None:
    """The workflow of changes makes what .ci/run makes, and the targets that the README begins with."""
    made = {word for line in commands(parsed(ROOT / ".github/workflows/ci.yml")) for word in line.split()[1:]}
    ours = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ours) > 3
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {*ours, "demo", "break", "test", "dist"} <= made
    assert all(f"make {target}" in readme for target in ("demo", "break", "test"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_actions_are_pinned_to_commits(file: Path) -> None:
    """Each action is named by a commit, with its version beside it, and no secret is used."""
    text = file.read_text(encoding="utf-8")
    used = [step["uses"] for step in steps(parsed(file)) if "uses" in step]
    pinned = re.findall(r"uses: ([\w-]+/[\w-]+@[0-9a-f]{40}) # v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert used
    assert pinned == used
    assert "secrets." not in text
    assert "password" not in text


def test_only_checked_files_are_published_and_by_trust() -> None:
    """The release is built once, checked and attested, then approved, then published by OIDC per package."""
    workflow = parsed(ROOT / ".github/workflows/release.yml")
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow["permissions"] == {}
    done = [step.get("run") or step["uses"].partition("@")[0] for step in build["steps"]]
    order = [
        'python release/version.py check "$GITHUB_REF_NAME"',
        "make dist",
        "actions/attest-build-provenance",
        "actions/upload-artifact",
    ]
    assert [step for step in done if step in order] == order
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == ["build", "approve"]
    assert publish["environment"] == "pypi-${{ matrix.package }}"
    assert publish["strategy"]["matrix"] == {"package": "${{ fromJSON(needs.build.outputs.packages) }}"}
    uses = [step["uses"].partition("@")[0] for step in publish["steps"] if "uses" in step]
    assert uses == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]  # no checkout, no build


def test_make_builds_every_distribution() -> None:
    """The list of distributions in the Makefile has every folder with a pyproject.toml."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (listed,) = re.findall(r"^DISTS\s*:= (.*)$", text, re.MULTILINE)
    patterns = ("*/pyproject.toml", "plugins/*/pyproject.toml", "integrations/*/pyproject.toml")
    folders = [file.parent.relative_to(ROOT) for pattern in patterns for file in ROOT.glob(pattern)]
    assert sorted(listed.split()) == sorted(map(str, folders))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[0-9]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("dependabot", ".github/dependabot.yml"),
    ],
)
def test_files_are_what_a_forge_accepts(schema: str, files: str) -> None:
    """Every workflow, form and setting fits the forge's schema."""
    found = sorted(map(str, ROOT.glob(files)))
    assert found
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_reports_of_bugs_have_their_versions() -> None:
    """The forms of both kinds of bugs require the command to reproduce it, and the line of versions."""
    forms = [parsed(file) for file in sorted(ROOT.glob(".github/ISSUE_TEMPLATE/[12]*.yml"))]
    assert len(forms) == 2
    for form in forms:
        fields = {each["id"]: each for each in form["body"]}
        for name in ("reproduce", "provenance"):
            assert fields[name]["validations"] == {"required": True}
        assert "graphpact doctor --provenance" in fields["provenance"]["attributes"]["description"]
