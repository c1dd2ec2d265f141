"""Fields that a request may have: those that this server knows, those without an effect, and those that it cannot obey."""

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

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "image_data": ([],),
    "mcp_servers": ([],),
    "web_search_options": (),
    "verbosity": ("medium",),
    "lora": ([],),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "min_tokens": (0,),
    "prompt_logprobs": (0,),
    "add_special_tokens": (True,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "top_a": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "structured_outputs": (),
    "regex": ("",),
}
"""Fields that this server does not support, with the values that have no effect (null never has one)."""


def check_known(
    fields: Mapping[str, Any], known: set[str], unknown: Unknown, ignored: set[str] = IGNORED, at: str = "",
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> None:  # fmt: skip
    """Note unknown fields. Raises RequestError for a value that would change the answer, and that this server cannot obey.

    at: a prefix of the names in messages. unsupported: fields that are refused, with the values that have no effect.
    """
    for key, value in fields.items():
        if key in known or key in ignored:
            continue
        if key not in unsupported:
            unknown.see(f"{at}{key}")
        # True == 1, but is not a number of answers
        elif not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in unsupported[key]):
            harmless = "".join(f", or give {json.dumps(v)}" for v in unsupported[key])
            raise invalid(
                f"{key} is not supported by this server: leave it out{harmless}", key, "unsupported_parameter"
            )
