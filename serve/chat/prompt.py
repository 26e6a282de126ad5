"""From the messages of a conversation to the token ids of a prompt."""

from collections.abc import Sequence
from typing import Any

from dsjax.errors import RequestError
from dsjax.serve.protocol import ChatMessage
from dsjax.tokenizer import Tokenizer


def encode_chat(messages: Sequence[ChatMessage], tokenizer: Tokenizer | None, max_model_len: int) -> list[int]:
    """Token ids of the conversation, ready for the assistant's answer. Raises RequestError."""
    if tokenizer is None:
        raise RequestError(
            "This model has no tokenizer, so it cannot chat; send token ids to /v1/completions.", param="messages"
        )
    text = tokenizer.render_chat([_for_template(message) for message in messages])
    return tokenizer.encode(text, add_special_tokens=False, max_model_len=max_model_len)


def _for_template(message: ChatMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    # OpenAI's newer name, which chat templates do not know: they would leave the message out.
    return fields | {"role": "system"} if message.role == "developer" else fields
