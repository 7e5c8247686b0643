"""What is asked of the engine, what it answers, and how far one answer has got; torch-free."""

from __future__ import annotations

import json
import secrets
from array import array
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, Protocol

from piecework.choices import by_name, number, truth, whole
from piecework.errors import OptionError

FinishReason = Literal["stop", "length", "abort"]
MOST_LOGPROBS = 20
MOST_ANSWERS = 128


@by_name
@dataclass(frozen=True)
class SamplingParameters:
    """How tokens are chosen and where an answer ends; raises OptionError for what has no meaning.

    A temperature of 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 leave all tokens in. Without a `seed` one is drawn
    for each request. `stop` strings are cut off the text; `stop_token_ids` end an answer beside the model's own end
    tokens, which `ignore_eos` disregards. `logprobs` asks for the log probability of each token and of so many others,
    of what the model said before penalties and temperature; None asks for none. `json_schema` is a schema as text that
    answers are held to.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    json_schema: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_tokens", 1, None), ("min_tokens", 0, None), ("top_k", 0, None), ("n", 1, MOST_ANSWERS),
        ):  # fmt: skip
            whole(name, getattr(self, name), low, high)
        for name, low_bound, high_bound in (
            ("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 0.0, 100.0),
        ):  # fmt: skip
            number(name, getattr(self, name), low_bound, high_bound)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise OptionError(f"`{name}` is `0`", hint="give a number above 0; 1 has no effect")
        if self.min_tokens > self.max_tokens:
            raise OptionError(
                f"`min_tokens={self.min_tokens}` is above `max_tokens={self.max_tokens}`", hint="lower it"
            )
        if self.seed is not None:
            whole("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        object.__setattr__(self, "stop", _texts(self.stop))
        given = self.stop_token_ids
        if not isinstance(given, tuple | list) or not all(type(each) is int and each >= 0 for each in given):
            raise OptionError(f"`stop_token_ids` is `{self.stop_token_ids!r}`", hint="give a tuple of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.json_schema:
            _schema(self.json_schema)
        truth("ignore_eos", self.ignore_eos)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class Request:
    """One prompt and how it is to be continued; `id` names it among those that are under way."""

    id: str
    prompt_ids: tuple[int, ...]
    parameters: SamplingParameters = field(default_factory=SamplingParameters)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(self.prompt_ids))
        if not self.prompt_ids:
            raise OptionError(
                "the prompt has no tokens", hint="give at least one token: a beginning-of-text token serves"
            )


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of a token that was chosen, its rank (1 = likeliest), and those of the likeliest others."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step added to one answer of a request.

    `text` may be empty where a character is not complete yet, or where what came may be the beginning of a stop string.
    `stop_reason` is the stop string or the stop token that ended the answer, None where the model's end token did.
    `tier` is the one that the step ran on.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    tier: int = 0


class Constraint(Protocol):
    """What tells which tokens may come next, and is told which came."""

    def allowed(self, count: int) -> Any: ...

    def advance(self, token_id: int) -> None: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def fault(self) -> str: ...


class Sequence:
    """One answer under way: its tokens so far, how many of them lie computed in its pages, and which pages those are.

    `order` is its place in the line: smaller came earlier. `limit` is the length at which it ends whatever comes.
    `pending` says that its next token was chosen and is not known to the host yet: it is the token's row among those
    that the step under way chose, -1 where there is none.
    """

    def __init__(self, request: Request, index: int, order: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.seed = seed
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_computed = 0
        self.num_cached = 0
        self.num_sealed = 0
        self.limit = len(self.token_ids) + request.parameters.max_tokens
        self.pending = -1
        self.is_ended = False
        self.pages: array[int] = array("i")
        self.digests: list[bytes] = []
        self.counts: Counter[int] = Counter()
        self.constraint: Constraint | None = None

    @property
    def parameters(self) -> SamplingParameters:
        return self.request.parameters

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens that there are, one that the host does not know yet included."""
        return len(self.token_ids) + (self.pending >= 0)

    @property
    def num_remaining(self) -> int:
        """Tokens that there are and that are not computed: 1 while the answer is decoded."""
        return self.length - self.num_computed

    @cached_property
    def prompt_tokens(self) -> array[int]:
        """The tokens of the prompt, each once."""
        return array("q", dict.fromkeys(self.request.prompt_ids))

    def append(self, token_id: int) -> None:
        """Add a token that was chosen."""
        self.pending = -1
        self.token_ids.append(token_id)
        self.counts[token_id] += 1
        if self.constraint is not None:
            self.constraint.advance(token_id)

    def draw(self) -> float:
        """Return the number in [0, 1) that chooses the next token.

        It follows from the seed, the answer and the position alone: neither what else is in the batch nor a restart of
        the sequence changes it.
        """
        place = f"{self.seed}/{self.index}/{len(self.token_ids)}"
        return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "big") / 2.0**64

    def digest_of(self, page: int, page_size: int) -> bytes:
        """Return what names the content of a full page: its tokens and all before them."""
        while len(self.digests) <= page:
            first = len(self.digests) * page_size
            tokens = ",".join(map(str, self.token_ids[first : first + page_size]))
            before = self.digests[-1] if self.digests else b""
            self.digests.append(blake2b(before + tokens.encode(), digest_size=16).digest())
        return self.digests[page]


def sequences_of(request: Request, order: int) -> list[Sequence]:
    """Return the sequences of a request, one for each answer; without a seed one is drawn for all of them."""
    seed = request.parameters.seed
    seed = secrets.randbits(63) if seed is None else seed
    return [Sequence(request, index, order + index, seed) for index in range(request.parameters.n)]


def _schema(text: Any) -> None:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"`json_schema` is no JSON: {error}", hint="give the schema as text") from error
    if not isinstance(found, dict):
        raise OptionError(f"`json_schema` is `{text[:80]}`", hint='give an object, such as {"type": "object"}')


def _texts(stop: Any) -> tuple[str, ...]:
    given: Many[Any] = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, tuple | list) or not all(isinstance(each, str) and each for each in given):
        raise OptionError(f"`stop` is `{stop!r}`", hint="give strings that are not empty")
    return tuple(given)
