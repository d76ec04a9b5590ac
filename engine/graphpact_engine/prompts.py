"""Prompts: text, token ids, or the messages of a conversation, checked and turned into token ids.

Does not: load a tokenizer, or compare token ids with the limits of an engine: `Scheduler.add` does.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from graphpact_engine.errors import RequestError

Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation, with at least ``role`` and ``content``."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text; token ids, as any sequence of integers or a one-dimensional array; or a conversation."""

_BYTES = bytes | bytearray | memoryview
_KINDS = "a prompt is a str, a list of token ids, or a list of messages"


def list_prompts(prompts: object) -> list[Any]:
    """Return the elements of a collection of prompts; each is checked by `encode`.

    Raises:
        RequestError: ``prompts`` is a single prompt, or not an ordered collection.
    """
    one = "to continue one prompt, give a list of one: "
    if isinstance(prompts, str):
        raise RequestError(
            f"prompts must be a list of prompts; got one str: {reprlib.repr(prompts)}",
            hint=f"{one}[{reprlib.repr(prompts)}]",
        )
    if _is_array(prompts):
        raise RequestError(
            f"prompts must be a list of prompts; got one {_kind(prompts)}",
            hint="give a list with the token ids of each prompt, without padding",
        )
    if isinstance(prompts, _BYTES | Mapping | AbstractSet) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a list of prompts; got {_kind(prompts)}", hint=_KINDS)
    listed = list(prompts)
    if listed and all(isinstance(each, int) for each in listed):
        raise RequestError(
            "prompts must be a list of prompts; got the token ids of one", hint=f"{one}[token_ids]"
        )
    if listed and all(isinstance(each, Mapping) for each in listed):
        raise RequestError(
            "prompts must be a list of prompts; got the messages of one conversation",
            hint=f"{one}[messages]",
        )
    return listed


def encode(prompt: Any, tokenizer: Callable[[], Any]) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        prompt: A `Prompt`, or anything else, which is refused.
        tokenizer: Returns the tokenizer of the checkpoint; called for text and conversations only.

    Raises:
        RequestError: The prompt is empty, of another type or not UTF-8 text; or the tokenizer has no chat
            template, or one that refuses the conversation.
        CheckpointError: The checkpoint has no tokenizer.
    """
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
        return _encode_text(prompt, tokenizer())
    if _is_array(prompt):
        prompt = prompt.tolist()
    if isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence):
        raise RequestError(f"the prompt is of type {_kind(prompt)}", hint=_KINDS)
    if len(prompt) and isinstance(prompt[0], Mapping):
        return _encode_conversation(prompt, tokenizer())
    return [each if type(each) is int else _token_id(each) for each in prompt]


def require_tokens(token_ids: Iterable[int], vocab_size: int, who: str) -> None:
    """Check that token ids are in a vocabulary.

    Raises:
        RequestError: Names ``who``, such as "the prompt has", and the first token id outside of it.
    """
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{who} token id {token}; the vocabulary of the model is 0 to {vocab_size - 1}"
            )


def check_text(text: str, name: str) -> None:
    """Check that a text is not empty, and can be encoded.

    Raises:
        RequestError: The text, called ``name`` in the message, is empty or has a lone surrogate.
    """
    if not text:  # some tokenizers turn it into a single begin token
        raise RequestError(f"{name} is empty", hint="give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python decodes invalid bytes of files as lone surrogates
        around = text[max(error.start - 20, 0) : error.start + 20]
        raise RequestError(f"{name} is not UTF-8 text: {around!r}") from error


def _encode_text(text: str, tokenizer: Any, **options: Any) -> list[int]:
    """Return the token ids of ``text``."""
    encoded: list[int] = tokenizer.encode(text, verbose=False, **options)
    return encoded


def _encode_conversation(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """Return the token ids of a conversation, up to the place where the answer begins."""
    for number, message in enumerate(messages, 1):
        name = f"message {number} of the conversation"
        if not _is_message(message):
            raise RequestError(
                f"{name} is not a message: {reprlib.repr(message)}",
                hint='a message is {"role": "user", "content": "..."}',
            )
        if message.get("content") and isinstance(message["content"], str):
            check_text(message["content"], name)
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError(
            "the tokenizer of the checkpoint has no chat template, so it cannot encode a conversation",
            hint="give the whole prompt as one str, or save a tokenizer that has a chat_template",
        )
    given = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
        return _encode_text(text, tokenizer, add_special_tokens=False)  # the template contains them
    except Exception as error:  # the template is a program of the checkpoint: it may raise anything
        raise RequestError(
            "the chat template of the tokenizer refuses the conversation:"
            f" {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error


def _is_message(value: Any) -> bool:
    """Return whether ``value`` has a role, and content or a substitute, such as tool calls."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str | list) or (content is None and not value.keys() <= {"role", "content"})


def _token_id(value: Any) -> int:
    """Return an element of a list of token ids as an int."""
    number = value.item() if _is_array(value) and value.ndim == 0 else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise RequestError(
            f"the prompt has an element of type {_kind(value)}: {reprlib.repr(value)}", hint=_KINDS
        )
    return number


def _is_array(value: object) -> bool:
    """Return whether ``value`` is an array, tensor or scalar of numpy, torch or a similar library."""
    return hasattr(value, "tolist") and hasattr(value, "ndim") and not isinstance(value, _BYTES)


def _kind(value: object) -> str:
    """Return the type of a value in words; of an array with its shape."""
    name = type(value).__name__
    return f"{name} of shape {list(value.shape)}" if hasattr(value, "shape") else name
