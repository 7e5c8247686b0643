"""Text to token ids and back, by the folder's fast tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from piecework.server.faults import Refusal

_LONG_TEXT = 4096  # from here on the event loop is not kept waiting for the tokenizer


@dataclass(frozen=True)
class Words:
    """A model's tokenizer, and how many ids it and the model know."""

    tokenizer: Tokenizer | None
    vocabulary: int

    def _need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise Refusal(
                400,
                "the model folder has no `tokenizer.json`, so that text cannot be read",
                hint="give the prompt as token ids: `\"prompt\": [1, 2, 3]`",
                param="prompt",
                code="no_tokenizer",
            )
        return self.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        tokenizer = self._need()
        # A lone surrogate is valid JSON and no text: it has no bytes.
        readable = text.encode("utf-8", "replace").decode("utf-8")

        def ids() -> list[int]:
            return list(tokenizer.encode(readable, add_special_tokens=add_special_tokens).ids)

        return await asyncio.to_thread(ids) if len(readable) > _LONG_TEXT else ids()

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        tokenizer = self._need()
        given = self.check(ids, "tokens")
        if len(given) > _LONG_TEXT:
            return await asyncio.to_thread(tokenizer.decode, given, skip_special_tokens)
        return tokenizer.decode(given, skip_special_tokens=skip_special_tokens)

    def check(self, ids: Sequence[int], param: str) -> list[int]:
        """Return token ids as they are, or raise Refusal that names the first one outside of the vocabulary."""
        wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise Refusal(
                400,
                f"token id `{wrong}` is not in the model's vocabulary",
                hint=f"ids run from 0 to {self.vocabulary - 1}",
                param=param,
                code="unknown_token",
            )
        return list(ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; an incomplete character is its replacement mark."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))
