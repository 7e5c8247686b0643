"""pw.LLM: offline generation from a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from piecework.api.folder import Alter, OpenModel, open_model, unaltered
from piecework.engine.generate import Generation, generate
from piecework.engine.text import read_tokenizer
from piecework.errors import OptionError
from piecework.events import Observer
from piecework.options import CompileOptions
from piecework.store.protocol import KernelStore


@dataclass(frozen=True)
class Completion:
    """One answer: its text (empty where the folder has no tokenizer), its token ids, and how it went."""

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    generation: Generation


class LLM:
    """A model folder, opened once and asked many times.

    The arguments are those of `pw.compile` and of a model folder: `dtype` and `device` of the weights, `options` of
    the compilation, the `store` (the platform's cache folder without one), an `observer` of events, `alter`, which
    may change what is asked of the pipeline, and the `tokenizer`, where it was read before (the folder's without one).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        options: CompileOptions | None = None,
        store: KernelStore | None = None,
        observer: Observer | None = None,
        offline: bool = False,
        alter: Alter = unaltered,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._given = tokenizer
        self.model: OpenModel = open_model(
            model,
            dtype=dtype,
            device=device,
            options=options,
            store=store,
            observer=observer,
            offline=offline,
            alter=alter,
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's fast tokenizer, read without any model library."""
        return self._given or read_tokenizer(self.model.folder)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt; one given as ids is taken as it is."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt).ids)
        ids = [int(token) for token in prompt]
        size = self.model.folder.config.get("vocab_size")
        wrong = next((token for token in ids if token < 0 or (isinstance(size, int) and token >= size)), None)
        if wrong is not None:
            raise OptionError(
                f"token id `{wrong}` is not in the model's vocabulary",
                hint=f"ids run from 0 to {size - 1}" if isinstance(size, int) else "ids are not negative",
                facts={"token_id": wrong},
            )
        return ids

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 16,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Continue each prompt greedily; a prompt is text or a list of token ids."""
        several = prompts if not _is_one(prompts) else [prompts]
        return [self._one(self.encode(prompt), max_tokens, ignore_eos) for prompt in several]  # type: ignore[arg-type]

    def _one(self, prompt_ids: list[int], max_tokens: int, ignore_eos: bool) -> Completion:
        model = self.model
        generation = generate(
            model.step,
            prompt_ids,
            sites=model.sites,
            dtype=model.dtype,
            max_tokens=max_tokens,
            end_of_sequence=() if ignore_eos else model.folder.end_of_sequence,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_positions=model.folder.max_positions,
            device=model.device,
        )
        ids = generation.token_ids
        text = self.tokenizer.decode(ids) if model.folder.tokenizer_file is not None else ""
        return Completion(text, ids, prompt_ids, generation)


def _is_one(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))
