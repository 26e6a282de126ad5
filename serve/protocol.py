"""Request bodies of the OpenAI API, as far as this server goes.

Types are strict: "1" is no number, 0.5 no integer. Fields that are not named here stay in `model_extra`.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from dsjax.engine.sampling_params import MAX_BIASED_IDS, SamplingParams
from dsjax.errors import RequestError
from dsjax.serve.prompts import MAX_PROMPTS, Prompt, split_prompts

MAX_MESSAGES = 8192
DEFAULT_MAX_TOKENS = 16  # of completions; OpenAI's


class _RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "ignore_eos",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "stop_token_ids",
    "n",
    "prompt_logprobs",
)


def _by_token(biases: dict[str, float]) -> dict[int, float]:
    """JSON has text for keys: token ids in digits. Raises ValueError for other text."""
    for key in biases:
        if not re.fullmatch(r"-?[0-9]{1,10}", key):
            raise ValueError(f"{key[:64]!r} is no token id")
    return {int(key): bias for key, bias in biases.items()}


Biases = Annotated[dict[str, float], Field(max_length=MAX_BIASED_IDS), AfterValidator(_by_token)]


class StreamOptions(_RequestModel):
    """`include_usage`: a last chunk with token counts."""

    include_usage: bool | None = None


class GenerationRequest(_RequestModel):
    """What both endpoints take. None stands for the default, as null does in OpenAI's API."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    timeout_s: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts. Raises RequestError for stream options without a stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise RequestError("stream_options needs stream: true.", param="stream_options")
        return bool(self.stream_options.include_usage)

    def _sampling_params(self, max_tokens: int | None, **given: Any) -> SamplingParams:
        """The sampling parameters, with their defaults for what is not given."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | given
        chosen = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, **chosen)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(split_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: int | None = None
    echo: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters; log-probabilities of an echo are those of the prompt. Raises RequestError."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None and (prompt_logprobs is None or prompt_logprobs >= 0):
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        params = self._sampling_params(max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)
        if (count := len(self.prompt) * params.n) > MAX_PROMPTS:
            raise RequestError(
                f"n is {params.n} for {len(self.prompt)} prompts, which makes {count} answers; at most {MAX_PROMPTS}.",
                param="n",
            )
        return params


def _join_parts(content: Any) -> Any:
    """Content in parts as one text. Raises ValueError for parts other than text."""
    if not isinstance(content, list):
        return content
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {place} must be {{'type': 'text', 'text': '...'}}; this model reads text only")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(_RequestModel):
    """A message of a conversation. Other fields, such as tool_calls, go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_join_parts, json_schema_input_type=str | list[Any] | None)] = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to report for each token; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters. Raises RequestError."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        newer = self.max_completion_tokens
        return self._sampling_params(self.max_tokens if newer is None else newer, logprobs=self.alternatives)
