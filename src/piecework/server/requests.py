"""The bodies that are asked with: OpenAI's fields, and those that vLLM's users add.

A field that this server does not know is ignored and named in a header of the answer; one that would change the answer
and cannot be honoured is refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, model_validator

MAX_STOPS, MAX_LOGPROBS = 16, 20
_LARGEST = 2**31 - 1
_SEEDS = 2**63

TokenId = Annotated[StrictInt, Field(ge=0, le=_LARGEST)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# Read without an error, and without an effect that a client could miss.
HARMLESS = frozenset(
    {
        "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
        "prompt_cache_retention", "verbosity", "web_search_options",
    }
)  # fmt: skip


class Body(BaseModel):
    """A body whose unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    def ignored(self) -> list[str]:
        """Return the fields that nothing reads."""
        return sorted(name for name in self.model_extra or {} if name not in HARMLESS)


class StreamOptions(BaseModel):
    """What a stream says besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """A schema that the answer has to fit."""

    model_config = ConfigDict(populate_by_name=True)

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("`response_format` of type `json_schema` needs `json_schema.schema`")
        return self


class Sampling(Body):
    """What both endpoints take."""

    model: str | None = None
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(default=None, gt=0, le=100)
    temperature: Number | None = Field(default=None, ge=0, le=100)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: StrictInt | None = Field(default=None, ge=-1, le=_LARGEST)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    min_tokens: StrictInt | None = Field(default=None, ge=0, le=_LARGEST)
    n: StrictInt | None = Field(default=None, ge=1, le=128)
    seed: StrictInt | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Number] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _streams_its_options(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is given, and `stream` is not true")
        if self.logit_bias:
            raise ValueError("`logit_bias` is not served; leave it out")
        return self

    @property
    def wanted_schema(self) -> str:
        """The JSON schema that answers are held to, as text; empty where they are free."""
        form = self.response_format
        if form is None or form.type == "text":
            return ""
        if form.json_schema is not None and form.type == "json_schema":
            return json.dumps(form.json_schema.schema_)
        return json.dumps({"type": "object"})

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(Sampling):
    """A body of `/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: StrictInt | None = Field(default=16, ge=1, le=_LARGEST)
    logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: StrictInt | None = Field(default=None, ge=1, le=128)
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _can_be_honoured(self) -> CompletionBody:
        if self.suffix:
            raise ValueError("`suffix` is not served; leave it out")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("`best_of` has to equal `n`: no answers are dropped here")
        if self.echo and self.logprobs is not None:
            raise ValueError("`echo` with `logprobs` is not served: the prompt's logprobs are not computed")
        return self


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the message as templates read it: parts of text are joined, an absent content is empty."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        found.setdefault("content", "")
        return found


class ChatBody(Sampling):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: StrictInt | None = Field(default=None, ge=1, le=_LARGEST)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _can_be_honoured(self) -> ChatBody:
        if self.functions or (self.tools and self.tool_choice != "none"):
            raise ValueError("`tools` are not served: calls are not read out of the answer; leave them out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs` to be true")
        return self


class TokenizeBody(Body):
    """A body of `/tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self


class DetokenizeBody(Body):
    """A body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
