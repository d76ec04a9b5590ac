"""The error tree: exit codes, hints, and the drawing in the module's docstring."""

import re

import pytest

from graphpact import errors
from graphpact.errors import GraphpactError, did_you_mean

_ALL = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, GraphpactError)]


def _documented() -> dict[str, str]:
    """Return the parent of each class in the tree of the module's docstring."""
    parents, at = {}, {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]+)(\w+(?:Error|Breach))\b", line)
        if match:
            depth = len(match[1])
            at = {d: name for d, name in at.items() if d < depth}
            parents[match[2]] = at[max(at)] if at else ""
            at[depth] = match[2]
    return parents


def test_the_picture_shows_the_tree() -> None:
    """The docstring's tree has every error under its parent, and no other."""
    tree = {c.__name__: "" if c is GraphpactError else c.__base__.__name__ for c in _ALL}
    assert _documented() == tree


@pytest.mark.parametrize("kind", _ALL, ids=lambda c: c.__name__)
def test_every_error_has_a_code_and_a_sentence(kind: type[GraphpactError]) -> None:
    """Each error has the exit code of its branch, 1, 2 or 3, and a docstring."""
    branch = {errors.UsageError: 2, errors.ContractError: 1, errors.EngineError: 3}
    expected = next((code for base, code in branch.items() if issubclass(kind, base)), 3)
    assert kind.code == expected
    assert (kind.__doc__ or "").endswith(".") or "\n" in (kind.__doc__ or "")


def test_a_hint_is_a_line_of_its_own() -> None:
    """A hint is on a separate line after ``help:``; without a hint there is no such line."""
    plain, hinted = GraphpactError("it broke"), GraphpactError("it broke", hint="mend it")
    assert str(plain) == "it broke"
    assert str(hinted) == "it broke\n  help: mend it"
    assert (hinted.message, hinted.hint, plain.hint) == ("it broke", "mend it", None)


def test_the_nearest_word() -> None:
    """A similar word is suggested, and a dissimilar one is not."""
    known = ["flashinfer", "trtllm_mla", "fa3"]
    assert did_you_mean("flashinfre", known) == "flashinfer"
    assert did_you_mean("trtllm-mla", iter(known)) == "trtllm_mla"
    assert did_you_mean("zzzzzz", known) is None
    assert did_you_mean("x", []) is None
