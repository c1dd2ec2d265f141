"""Checks which fields a request has: known, ignored, unsupported, or unknown."""

import json
from collections.abc import Mapping
from typing import Any

from pyllama_kvflash.serve.protocols.fields import Unknown
from pyllama_kvflash.serve.protocols.request_error import invalid

IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "n_keep", "n_discard", "n_cache_reuse", "skip_special_tokens",
    "spaces_between_special_tokens", "request_id", "priority", "api_server", "can_abort", "legacy_api", "sampler_seed",
    "trim_stop", "use_default_badwordsids", "custom_token_bans", "custom_model", "chat_completion_source", "backend_sampling",
}  # fmt: skip
"""Fields that do not affect the answer."""

UNSUPPORTED = {
    "add_special_tokens", "audio", "best_of", "echo", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "function_call",
    "functions", "guidance_scale", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "image_data", "length_penalty",
    "logits_processors", "lora", "mcp_servers", "min_tokens", "modalities", "negative_prompt", "no_repeat_ngram_size", "num_beams",
    "penalty_alpha", "post_sampling_probs", "prompt_logprobs", "regex", "return_tokens", "smoothing_factor", "structured_outputs",
    "suffix", "tfs", "tfs_z", "top_a", "use_beam_search", "verbosity", "web_search_options",
}  # fmt: skip
"""Fields that this server refuses, unless the value asks for nothing: it is the one in _USUAL or, without one there, empty, false or 0."""
_USUAL: dict[str, Any] = {
    "add_special_tokens": True,
    "best_of": 1,
    "encoder_repetition_penalty": 1,
    "function_call": "none",
    "guidance_scale": 1,
    "length_penalty": 1,
    "modalities": ["text"],
    "num_beams": 1,
    "tfs": 1,
    "tfs_z": 1,
    "verbosity": "medium",
}
"""Values of unsupported fields that ask for nothing."""


def check_known(
    fields: Mapping[str, Any], known: set[str], unknown: Unknown, ignored: set[str] = IGNORED, at: str = "",
    unsupported: set[str] = UNSUPPORTED,
) -> None:  # fmt: skip
    """Add unknown fields to `unknown`. Raises RequestError for an unsupported field, unless its value asks for nothing.

    at: prefix of the fields' names in messages. unsupported: names of the unsupported fields.
    """
    for key, value in fields.items():
        if key in known or key in ignored:
            continue
        if key not in unsupported:
            unknown.see(f"{at}{key}")
        elif key in _USUAL:
            usual = _USUAL[key]
            is_bool = isinstance(value, bool)
            if value != usual or is_bool != isinstance(usual, bool):  # True == 1, but it is not a number
                msg = f"{key} is not supported by this server: leave it out, or give {json.dumps(usual)}"
                raise invalid(msg, key, "unsupported_parameter")
        elif value:
            raise invalid(f"{key} is not supported by this server: leave it out", key, "unsupported_parameter")
