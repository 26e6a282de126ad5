"""Response bodies of the OpenAI API, as far as this server goes."""

from typing import Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """`cached_tokens`: how many tokens of the prompts were found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, an entry per token; `text_offset` counts characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(BaseModel):
    """A token that might have stood at a place of a chat answer."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """A token of a chat answer, and the likeliest ones at its place, best first."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer's tokens."""

    content: list[ChatTokenLogprob]


class PromptToken(BaseModel):
    """A token that might have stood at a place of the prompt. `rank`: 1 for the likeliest, if it is among those."""

    logprob: float
    rank: int | None = None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptToken] | None]


class CompletionChoice(BaseModel):
    """An answer to a prompt, or a piece of it; `finish_reason` is set once it is complete.

    `prompt_logprobs` are in the first piece.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


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

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(BaseModel):
    """A piece of an answer: `delta` holds "role", "content", or nothing."""

    index: int
    delta: dict[str, str]
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(BaseModel):
    """One chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
