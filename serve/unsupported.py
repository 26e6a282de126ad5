"""Request fields that this server does not know, or knows but does not implement."""

import logging
from collections.abc import Mapping
from typing import Any

from dsjax.errors import RequestError

logger = logging.getLogger("dsjax")

MOST_NAMES_LOGGED = 100
_logged: set[str] = set()

_COMMON: dict[str, tuple[Any, ...]] = {  # values that change nothing, beside null
    "stop": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "best_of": (1,),
}
UNSUPPORTED_COMPLETION = _COMMON | {
    "suffix": ("",),
    "max_completion_tokens": (),
    "prompt_embeds": (),
}
UNSUPPORTED_CHAT = _COMMON | {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "thinking": ({"type": "disabled"},),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def check_extra_fields(extra: Mapping[str, Any] | None, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields of `unsupported` with a value that asks for something; log other unknown fields once per name."""
    for name, value in (extra or {}).items():
        if name not in unsupported:
            _log_once(name)
        elif value is not None and not any(_equal(value, neutral) for neutral in unsupported[name]):
            raise RequestError(f"{name} is not supported yet; leave it out.", param=name)


def _equal(value: Any, neutral: Any) -> bool:
    """Equality for which true is not 1 and false is not 0."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _log_once(name: str) -> None:
    if name not in _logged and len(_logged) < MOST_NAMES_LOGGED:
        _logged.add(name)
        logger.info("Ignoring the unknown request field %r (said once)", name[:64])
