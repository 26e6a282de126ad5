"""What tokens are called in answers."""

import functools
from typing import NamedTuple

from dsjax.tokenizer import Tokenizer


class _Name(NamedTuple):
    text: str
    bytes: list[int] | None


class TokenNames:
    """Tokens as text and bytes. Keeps what it has found, for a vocabulary at most."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._name = functools.cache(self._find)

    def text(self, token: int) -> str:
        """The text of a token; "bytes:\\xe2\\x80" for one that holds part of a character only, as OpenAI writes it.

        Without a tokenizer "token_id:5".
        """
        return self._name(token).text

    def bytes(self, token: int) -> list[int] | None:
        """The bytes of a token, None without a tokenizer."""
        return self._name(token).bytes

    def _find(self, token: int) -> _Name:
        if self._tokenizer is None:
            return _Name(f"token_id:{token}", None)
        content = self._tokenizer.token_bytes(token)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        return _Name(text, list(content))
