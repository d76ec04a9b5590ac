"""The generation config of a checkpoint: end tokens, defaults of sampling parameters, and what is not served.

Its fields are of four kinds. Some are the values of parameters that are None in a request (`_SERVED`). Some
recommend how to draw tokens (`_RECOMMENDED`): a request has to ask for this, because graphpact is greedy by
default. Some have no effect on the tokens of a decoder, or limit their number, which each request does
(`_NO_EFFECT`). All others would change the tokens: a warning names them when the checkpoint is loaded.

Does not: change logits; `graphpact_engine.logits` does.
"""

import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from graphpact_engine.errors import CheckpointError, RequestError
from graphpact_engine.models.config_file import read_json
from graphpact_engine.request import SamplingParams

_log = logging.getLogger(__name__)

FILE = "generation_config.json"

_SERVED = {
    "eos_token_id",
    "repetition_penalty",
    "suppress_tokens",
    "min_new_tokens",
    "min_length",
    "stop_strings",
}
_RECOMMENDED = {"do_sample", "temperature", "top_p", "top_k", "min_p"}
_NO_EFFECT = {
    "transformers_version",
    # tokens that only prompts, padding, or encoder-decoder models use
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    # limits, which each request has itself
    "max_length",
    "max_new_tokens",
    # the cache, compilation, and what else is returned
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "return_legacy_cache",
    "prefill_chunk_size",
    "low_memory",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    # beam search, without which they are not read; num_beams is not served
    "early_stopping",
    "length_penalty",
    "renormalize_logits",
    # assisted generation, which gives the same tokens
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "assistant_ensemble_weight",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "speculation_type",
    "use_mtp",
}
_NO_LIMIT = 2**63
_NEUTRAL: Mapping[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "typical_p": 1,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
}
"""Values at which fields that are not served have no effect, in addition to 0, None and False."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the generation config of a checkpoint says.

    Args:
        eos_token_ids: The end tokens of the model.
        sampling: The values of parameters that are None in a request.
        min_length: Number of tokens, prompt and output, before which no end token is generated. It applies
            only without ``min_new_tokens``.
        recommended: The temperature, top-p, top-k and min-p that the checkpoint recommends, by parameter;
            empty if it recommends greedy generation.
    """

    eos_token_ids: frozenset[int]
    sampling: SamplingParams
    min_length: int
    recommended: Mapping[str, float]

    def complete(self, sampling: SamplingParams, prompt_len: int) -> SamplingParams:
        """Return ``sampling`` with the checkpoint's values where it has None."""
        own = self.sampling
        least = own.min_new_tokens
        if least is None:
            least = max(self.min_length - prompt_len, 0)
        defaults: dict[str, Any] = {
            "repetition_penalty": own.repetition_penalty,
            "suppress_tokens": own.suppress_tokens,
            "stop": own.stop,
            "min_new_tokens": min(least, sampling.max_new_tokens),
        }
        left_open = {
            name: value for name, value in defaults.items() if value and getattr(sampling, name) is None
        }
        return replace(sampling, **left_open) if left_open else sampling


def load_generation_defaults(path: Path, config: Any, vocab_size: int) -> GenerationDefaults:
    """Return what the generation config of a checkpoint says; a warning names the fields that are not served.

    Without a file, the fields are those of ``config.json``, where old checkpoints have them; so are the end
    tokens if the file does not name any.

    Args:
        path: The directory of the checkpoint.
        config: The transformers config of the model.
        vocab_size: Number of token ids of the model. Others in ``suppress_tokens`` have no effect.

    Raises:
        CheckpointError: The file is not a JSON object, or a field that is served has an invalid value.
    """
    file = path / FILE
    fields = {"eos_token_id": getattr(config.get_text_config(), "eos_token_id", None)}
    if file.exists():
        fields |= read_json(file)
    else:
        file = path / "config.json"
        known = vars(GenerationConfig())
        fields = {name: value for name, value in read_json(file).items() if name in known} | fields
    not_served = {
        name: value
        for name, value in fields.items()
        if not name.startswith("_")
        and name not in _SERVED | _RECOMMENDED | _NO_EFFECT
        and value not in (None, False, [], {}, _NEUTRAL.get(name))
    }
    if not_served:
        listed = ", ".join(f"{name} = {reprlib.repr(value)}" for name, value in not_served.items())
        _log.warning("%s: these fields are not served, but would change the tokens: %s", file, listed)
    try:
        return GenerationDefaults(
            eos_token_ids=_end_tokens(fields.get("eos_token_id"), vocab_size),
            sampling=_served(fields, vocab_size),
            min_length=_min_length(fields.get("min_length")),
            recommended=_recommended(fields),
        )
    except RequestError as error:
        raise CheckpointError(f"{file}: {error.message}", hint=f"correct {file.name}") from error


def _end_tokens(value: object, vocab_size: int) -> frozenset[int]:
    """Return ``eos_token_id`` as a set."""
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise RequestError(
            f"eos_token_id must be a token id from 0 to {vocab_size - 1}, a list of them, or null;"
            f" got {reprlib.repr(value)}"
        )
    return frozenset(tokens)


def _served(fields: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Return the values of parameters that are None in a request."""
    defaults = SamplingParams(
        max_new_tokens=_NO_LIMIT,
        min_new_tokens=fields.get("min_new_tokens"),
        repetition_penalty=fields.get("repetition_penalty"),
        suppress_tokens=fields.get("suppress_tokens"),
        stop=fields.get("stop_strings"),
    )
    suppressed = [token for token in defaults.suppress_tokens or () if token < vocab_size]
    return replace(defaults, suppress_tokens=suppressed)


def _min_length(value: object) -> int:
    """Return ``min_length`` as a number."""
    if not (value is None or (type(value) is int and value >= 0)):
        raise RequestError(f"min_length must be a whole number; got {reprlib.repr(value)}")
    return value or 0


def _recommended(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the recommended sampling parameters, by their names in `SamplingParams`."""
    if not fields.get("do_sample"):
        return {}
    given = {"temperature": 1.0} | {
        name: fields[name]
        for name in ("temperature", "top_p", "top_k", "min_p")
        if fields.get(name) is not None
    }
    SamplingParams(**given)  # refuses invalid values
    return given
