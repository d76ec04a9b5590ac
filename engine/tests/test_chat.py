"""Conversations: prompts of messages, put into the tokenizer's chat template."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpact_cli import main
from graphpact_engine import Delta, Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import RequestError

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user begins') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m['content'].strip() }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)
HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " Héllo "}]


def build(path: Path) -> Engine:
    """Return an engine on a checkpoint."""
    return Engine(EngineConfig.load(None, env={}, overrides=[f'model.path="{path}"', 'engine.device="cpu"']))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shipped model with a chat template."""
    path = Path(shutil.copytree(TINY, tmp_path_factory.mktemp("chat") / "model"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def engine(chatty: Path) -> Iterator[Engine]:
    """Yield an engine on a model with a chat template."""
    with build(chatty) as engine:
        yield engine


def test_a_conversation_is_its_template_filled_in(engine: Engine) -> None:
    """Messages give the token ids of the filled-in template, up to the beginning of the answer."""
    text = "[system] Be short.\n[user] Héllo\n[assistant] "
    done = engine.generate([HELLO, text, tuple(HELLO)], SHORT)
    assert done[0].token_ids == done[1].token_ids == done[2].token_ids
    assert done[0].prompt is HELLO
    request = engine.add(HELLO, SHORT)
    assert bytes(request.prompt_token_ids).decode() == text
    engine.abort(request)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "assistant", "content": "x"}], "TemplateError: a user begins"),
        ([{"role": "user"}], "message 1 of the conversation is not a message: {'role'"),
        ([{"role": "user", "content": 5}], "message 1 of the conversation is not a message"),
        ([{"role": "user", "content": None}], "message 1 of the conversation is not a message"),
        ([{"content": "x"}], "message 1 of the conversation is not a message"),
        ([HELLO[1], {"role": None, "content": "x"}], "message 2 of the conversation is not a message"),
        ([HELLO[1], "x"], "message 2 of the conversation is not a message: 'x'"),
        ([{}], "message 1 of the conversation is not a message"),
        ([{"role": "user", "content": ["parts"]}], "chat template of the tokenizer refuses"),
        ([{"role": "user", "content": "a\udc80"}], "message 1 of the conversation is not UTF-8"),
        ([{"role": "user", "content": "x" * 5000}], "has a prompt of 50"),
    ],
)
def test_odd_conversations_are_refused(messages: Any, says: str, engine: Engine) -> None:
    """An invalid conversation, or one that the template refuses, is refused with its position."""
    with pytest.raises(RequestError, match=f"prompt 2 of 2: .*{says}"):
        engine.generate([HELLO, messages], SHORT)
    assert not engine.scheduler.has_work


def test_a_tokenizer_without_a_template_refuses_conversations() -> None:
    """Without a chat template there is no format to guess: the error says to give the whole prompt."""
    with build(TINY) as engine, pytest.raises(RequestError, match="has no chat template") as raised:
        engine.generate([HELLO], SHORT)
    assert "as one str" in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append({'role': 'x'}) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ 1 // 0 }}",
        "{% if %}",
    ],
)
def test_a_hostile_template_is_refused(
    template: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template runs in a sandbox: forbidden operations and failures in it give one error."""
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match="chat template of the tokenizer refuses"):
        engine.generate([HELLO], SHORT)


def test_the_command_chats(chatty: Path, capsys: pytest.CaptureFixture[str], engine: Engine) -> None:
    """``--chat`` makes each prompt a user's message; the answer is on a separate line."""
    expected = engine.generate([[{"role": "user", "content": "Hi"}]], SHORT)[0]
    options = ["--model", str(chatty), "--chat", "-n", "4", "--ignore-eos", "--quiet", "Hi"]
    assert main(["generate", *options]) == 0
    assert capsys.readouterr().out == f"Hi\n{expected.text}\n"
    assert main(["generate", *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["prompt"], answer["token_ids"]) == ("Hi", expected.token_ids)
    assert main(["generate", "--model", str(TINY), "--chat", "Hi"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_the_options_of_the_command_are_parameters(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sampling option of the command sets the parameter of its name, and no other."""
    params: dict[str, Any] = {
        "max_new_tokens": 30,
        "min_new_tokens": 3,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ("e", "a "),
    }
    asked: list[SamplingParams] = []

    def stream(engine: Engine, prompts: Any, sampling: SamplingParams) -> Iterator[Delta]:
        asked.append(sampling)
        return iter(())

    monkeypatch.setattr(Engine, "stream", stream)
    monkeypatch.setattr("graphpact_engine.cli.generate.build_engine", lambda *_, **__: engine)
    for names in [*([name] for name in params), list(params), []]:
        options = [
            f"--{name.replace('_', '-')}={value}"
            for name in names
            for value in (params[name] if isinstance(params[name], tuple) else [params[name]])
        ]
        assert main(["generate", "--model", str(TINY), *options, "The "]) == 0
        assert asked.pop() == SamplingParams(**{name: params[name] for name in names})


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [(), ("--temperature=0",), ("--quiet",)])
def test_what_a_checkpoint_recommends_is_reported(
    given: tuple[str, ...],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Greedy generation against the checkpoint's recommendation gives one note, with the options for it."""
    path = Path(shutil.copytree(TINY, tmp_path / "model"))
    fields = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 256}
    (path / "generation_config.json").write_text(json.dumps(fields))
    assert main(["generate", "--model", str(path), "-n", "2", *given, "The "]) == 0
    err = capsys.readouterr().err
    said = "generation is greedy; the checkpoint recommends --temperature 0.6 --top-p 0.9" in err
    assert said == (given == ())
    with build(path) as engine:
        assert SamplingParams(**engine.recommended_sampling) == SamplingParams(temperature=0.6, top_p=0.9)
