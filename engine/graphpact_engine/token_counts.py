"""`least_tokens`: a number of tokens that a text has at least, known before it is encoded.

Does not: encode; long texts take minutes, so `graphpact_engine.prompts` asks here first.
"""

import functools
import json
from typing import Any

_KEEPING = frozenset({"ByteLevel", "Split", "Digits", "Metaspace"})
"""Pre-tokenisers that drop nothing, unless they split by a pattern and remove it."""


def least_tokens(tokenizer: Any, text: str) -> int:
    """Return a number of tokens that ``text`` has at least, without encoding it; 0 if none is known.

    It is known where a token stands for a part of the text that is no longer than itself and nothing is
    dropped: for BPE over bytes, or with a fallback to bytes, and normalisers that keep all characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return 0
    longest, composes = _longest_token(backend, backend.get_vocab_size())
    if composes:
        from tokenizers import normalizers  # noqa: PLC0415  an extra

        text = normalizers.NFC().normalize_str(text)
    return -(-len(text.encode()) // longest) if longest else 0


@functools.lru_cache(maxsize=1)
def _longest_token(backend: Any, size: int) -> tuple[int, bool]:
    """Return the bytes of text that one token stands for at most, 0 if unknown; and whether NFC comes first.

    It reads the whole vocabulary, which takes longer than encoding a prompt, so the last result is kept.

    Args:
        backend: The tokenizer of the library tokenizers.
        size: Its number of tokens: with more, the result may be another.
    """
    del size
    from tokenizers import pre_tokenizers  # noqa: PLC0415  an extra

    described = json.loads(backend.to_str())
    model, added = described["model"], described["added_tokens"]
    if model["type"] != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return 0, False  # tokens of unknown words, or that take the spaces around them, have no longest
    before = _parts(described["pre_tokenizer"], "pretokenizers")
    normal = _parts(described["normalizer"], "normalizers")
    by_bytes = any(part["type"] == "ByteLevel" for part in before)
    every_byte = (
        pre_tokenizers.ByteLevel.alphabet() if by_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    keeps_all = (
        (by_bytes or model["byte_fallback"])
        and model["vocab"].keys() >= set(every_byte)
        and all(part["type"] in _KEEPING and part.get("behavior") != "Removed" for part in before)
        and all(part["type"] in ("NFC", "Prepend") or _is_space_mark(part) for part in normal)
    )
    if not keeps_all:
        return 0, False
    # In a vocabulary of bytes, one character stands for one byte.
    longest = max(len(token if by_bytes else token.encode()) for token in model["vocab"])
    longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
    return longest, any(part["type"] == "NFC" for part in normal)


def _parts(described: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normaliser or pre-tokeniser; a sequence has them under ``name``."""
    if described is None:
        return []
    parts: list[dict[str, Any]] = described[name] if described["type"] == "Sequence" else [described]
    return parts


def _is_space_mark(normalizer: dict[str, Any]) -> bool:
    """Return whether a normaliser replaces each space by the longer mark of SentencePiece."""
    given = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    return normalizer == given
