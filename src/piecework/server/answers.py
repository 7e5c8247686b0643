"""The bodies that are answered with, in OpenAI's shape."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What was wrong; `hint` says what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    hint: str = ""


class ErrorAnswer(BaseModel):
    """Any answer that is not the one that was asked for."""

    error: ErrorDetail


class Usage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class CompletionLogprobs(BaseModel):
    """Log-probabilities as `/v1/completions` gives them: four lists of one length."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(BaseModel):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """What `/v1/completions` answers, whole or in chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """One token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that came, and those that might have."""

    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    """Log-probabilities as `/v1/chat/completions` gives them."""

    content: list[TokenLogprob] = Field(default_factory=list)


class ChatMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None


class ChatCompletion(BaseModel):
    """What `/v1/chat/completions` answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A name that may stand in `model`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "piecework"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """What `/v1/models` answers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """What `/tokenize` answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Prompt(BaseModel):
    """What `/detokenize` answers."""

    prompt: str


class Version(BaseModel):
    """What `/version` answers."""

    version: str


class Probe(BaseModel):
    """What the probes answer: the phase, and how far it is."""

    ready: bool
    phase: str
    detail: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float
    phases: list[dict[str, Any]] = Field(default_factory=list)
