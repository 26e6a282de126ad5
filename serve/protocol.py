"""Request and response bodies of the OpenAI API, as far as this server goes.

Types are strict: "1" is no number, 0.5 no integer. Fields that are not named here stay in `model_extra`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import RequestError
from dsjax.serve.prompts import Prompt, split_prompts

MAX_MESSAGES = 8192


class _RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


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

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling parameters, with defaults for what is not given. Raises RequestError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            max_tokens=max_tokens,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(split_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]


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


class Usage(BaseModel):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """The answer to one prompt, or a piece of it; `finish_reason` is set once it is complete."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class Completion(BaseModel):
    """Answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """A whole answer."""

    index: int = 0
    message: AssistantMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """A piece of an answer: `delta` holds "role", "content", or nothing."""

    index: int = 0
    delta: dict[str, str]
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(BaseModel):
    """One chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A served model. `max_model_len`: its context in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dsjax"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
