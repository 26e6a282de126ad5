"""The prompt as the beginning of an answer."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.serve.prompts import Prompt
from dsjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """The text of a prompt, and how many characters of it come before each of its tokens."""

    text: str
    offsets: list[int]


def echo_of(prompt: Prompt, ids: Sequence[int], tokenizer: Tokenizer | None) -> Echo:
    """The echo of `prompt`, which has become the tokens `ids`. Without a tokenizer it is empty.

    Text is given back as it came. Tokens that are not in it, such as the begin of text, have no length.
    """
    if tokenizer is None:
        return Echo("", [0] * len(ids))
    pieces = [tokenizer.token_bytes(token) for token in ids]
    whole = prompt.encode() if isinstance(prompt, str) else b"".join(pieces)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, characters, position = [], 0, 0
    for piece in pieces:
        offsets.append(characters)
        if whole.startswith(piece, position):
            position += len(piece)
            characters += len(decoder.decode(piece))
    return Echo(whole.decode(errors="replace"), offsets)
