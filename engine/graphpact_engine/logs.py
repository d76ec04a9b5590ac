"""Structured logs: `log_event` writes them, `JsonFormatter` and `TextFormatter` print them.

The events, all of loggers below ``graphpact_engine``:

    engine started      INFO      device, lanes, shapes, seconds
    shape captured      INFO      lane, shape, seconds, nodes, bytes
    eager run           INFO      lane, mode, reason, why, batch_size, num_tokens; once per reason and mode
    request preempted   INFO      request, tokens, times
    request finished    INFO      request, reason, prompt_tokens, generated_tokens, preemptions
    pact breach         ERROR     rule, error, message: a step ended because the contract was broken

Does not: configure logging, unless `log_to_stderr` is called; `graphpact generate --log-format` calls it.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
ROOT = "graphpact_engine"
"""The logger above all of an engine's."""

_FIELDS = "graphpact_fields"


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event with its fields; handlers find them as ``record.graphpact_fields``.

    Does nothing without a handler, because Python would then print the event of an error without its fields.

    Args:
        logger: The logger.
        level: Its level, such as `logging.INFO`.
        event: The event: always the same words.
        fields: Its data: numbers, and other objects, which are written with `str`.
    """
    if logger.isEnabledFor(level) and logger.hasHandlers():
        logger.log(level, event, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """A formatter of one line per record: level, event, and fields as ``key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = getattr(record, _FIELDS, {})
        pairs = [f"{name}={_plain(value)}" for name, value in fields.items()]
        return " ".join([f"{record.levelname.lower()}:", record.getMessage(), *pairs])


class JsonFormatter(logging.Formatter):
    """A formatter of one JSON object per record: time, level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@contextmanager
def log_to_stderr(form: LogFormat) -> Iterator[None]:
    """Print the engine's events and warnings to standard error, and nowhere else, within the context."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger(ROOT)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _plain(value: object) -> str:
    """Return a value as one word: a number as it is, all else in quotes if it needs them."""
    text = str(value)
    return json.dumps(text) if not text or any(mark in text for mark in ' ="\n') else text
