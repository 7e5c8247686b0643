"""Answers that are held to a JSON schema: which tokens may come next, by llguidance, which is an extra."""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from piecework.errors import OptionError

KEPT = 64  # grammars; one is a few hundred kilobytes


class Constraint:
    """How far one answer has got in its grammar."""

    def __init__(self, matcher: Any, *, has_end: bool) -> None:
        self._matcher = matcher
        self._has_end = has_end

    def allowed(self, count: int) -> Tensor:
        """Return which of the first `count` tokens may come next.

        Tensors:
            ->  [V]  bool
        """
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (words[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        found = bits.flatten()[:count].bool()
        return found if found.shape[0] == count else torch.nn.functional.pad(found, (0, count - found.shape[0]))

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow; where the model has no token for an end, whether nothing has to."""
        return bool(self._matcher.is_stopped() or (not self._has_end and self._matcher.is_accepting()))

    @property
    def fault(self) -> str:
        """What went wrong: a token that was not allowed, or a grammar that outran its limits."""
        return str(self._matcher.get_error())


class Grammars:
    """The grammars of one model's vocabulary: made when they are first asked for, by any thread, and kept."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary_size: int, end_of_sequence: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._size = vocabulary_size
        self._ends = sorted(end_of_sequence)
        self._words: Any = None
        self._library: Any = None
        self._made: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, schema: str) -> Constraint:
        """Return what holds one answer to a schema. Raises OptionError where the schema cannot be followed."""
        with self._lock:
            if schema not in self._made:
                self._made[schema] = self._make(schema)
            self._made.move_to_end(schema)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return Constraint(self._made[schema].deep_copy(), has_end=bool(self._ends))

    def _make(self, schema: str) -> Any:
        if self._words is None:
            self._words = self._read_words()
        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise OptionError(f"the schema is no JSON object: {error}", hint="give a JSON schema") from error
        # Silent: what is wrong with a schema is told to whoever sent it, and not to the log.
        matcher = self._library.LLMatcher(self._words, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise OptionError(
                f"answers cannot be held to the schema: {reason}",
                hint="leave out the keyword, or put it in `description`; references stay within the schema",
            )
        return matcher

    def _read_words(self) -> Any:
        """Read the vocabulary as bytes, which takes about a second for one of 100,000."""
        if self._tokenizer is None:
            raise OptionError("a schema needs a tokenizer, and the folder has none", hint="ask without a schema")
        try:
            self._library = importlib.import_module("llguidance")
        except ModuleNotFoundError as error:
            raise OptionError(
                "answers are held to a schema by the package `llguidance`, which is not installed",
                hint="pip install 'piecework[grammar]'",
            ) from error
        tokenizer, ends = self._tokenizer, self._ends
        if not ends:  # the model has no end of its own: one that nobody says stands in for it
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            ends = [tokenizer.get_vocab_size()]
            tokenizer.add_special_tokens(["<|the end of an answer|>"])
        size = max(self._size, tokenizer.get_vocab_size())
        try:
            return self._library.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
        except Exception as error:  # the library raises nothing narrower
            raise OptionError(
                f"answers of this model cannot be held to a schema: its tokenizer is not read: {error}",
                hint="ask without a schema",
            ) from error
