"""`ended_by_errors`: what ends the process of an engine, with which message and status."""

import pytest

from graphpact.entry_errors import ended_by_errors
from graphpact.errors import ConfigError


def test_an_error_of_graphpact_ends_the_process_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    """Message and hint are written to stderr, without a traceback; the status is the error's."""
    with pytest.raises(SystemExit) as ended, ended_by_errors("graphpact-acme"):
        raise ConfigError("it is so", hint="do this")
    assert ended.value.code == ConfigError.code == 2
    assert capsys.readouterr().err == f"graphpact: {ConfigError('it is so', hint='do this')}\n"


def test_a_missing_module_ends_the_process_with_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    """Other errors are printed with their traceback; the help names the distribution's extra for the tape."""
    with pytest.raises(SystemExit) as ended, ended_by_errors("graphpact-acme"):
        import a_module_that_nobody_has  # noqa: F401
    assert ended.value.code == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "graphpact: GRAPHPACT is set and cannot be served: ModuleNotFoundError: No module named" in err
    assert 'the tape needs "graphpact-acme[tape]"' in err


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(7)])
def test_an_end_that_was_asked_for_stays_as_it_is(
    raised: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C and an exit of the engine pass through; nothing is written."""
    with pytest.raises(type(raised)) as ended, ended_by_errors("graphpact-acme"):
        raise raised
    assert ended.value is raised
    assert capsys.readouterr().err == ""
