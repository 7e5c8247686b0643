"""pw.LLM: offline generation from a model folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from tokenizers import Tokenizer

from piecework.api.folder import Alter, OpenModel, open_model, unaltered
from piecework.api.stores import report_to_log
from piecework.api.together import going_on_together
from piecework.engine.generate import GeneratedToken, Generation, generate
from piecework.engine.text import read_tokenizer
from piecework.errors import OptionError
from piecework.events import Observer, Phase, phase
from piecework.options import CompileOptions
from piecework.store.protocol import KernelStore

if TYPE_CHECKING:  # what one prompt after another does without
    from piecework.engine.follow import Follower
    from piecework.engine.loop import Engine
    from piecework.engine.offline import Answer
    from piecework.engine.options import EngineOptions
    from piecework.engine.sequence import SamplingParameters
    from piecework.engine.served import Served
    from piecework.parallel.ranks import Ranks

Prompt: TypeAlias = str | Sequence[int]


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
    Where several processes share the model (`tensor_parallel_size`), each makes its own and asks it the same; `ranks`
    are those that were joined already.
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
        ranks: Ranks | None = None,
    ) -> None:
        self._given = tokenizer
        self._observer: Observer = observer or report_to_log
        self.model: OpenModel = open_model(
            model,
            dtype=dtype,
            device=device,
            options=options,
            store=store,
            observer=observer,
            offline=offline,
            alter=alter,
            ranks=ranks,
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

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: None = None,
        *,
        max_tokens: int = 16,
        ignore_eos: bool = False,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: Prompt | Sequence[Prompt], parameters: SamplingParameters | Sequence[SamplingParameters]
    ) -> list[Answer]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: SamplingParameters | Sequence[SamplingParameters] | None = None,
        *,
        max_tokens: int = 16,
        ignore_eos: bool = False,
    ) -> list[Completion] | list[Answer]:
        """Continue each prompt; a prompt is text or a list of token ids.

        Without `parameters` each is continued greedily, one after the other, with the time and the lead of each token.
        With `parameters`, one for all or one for each, they are continued together by an engine.
        """
        several: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        if parameters is None:
            with phase(self._observer, "prompt"):
                encoded = [self.encode(prompt) for prompt in several]
            with going_on_together(self.model.ranks):
                answers = [self._one(prompt, max_tokens, ignore_eos) for prompt in encoded]
                if self.model.ranks is not None:
                    self.model.ranks.must_agree([each.token_ids for each in answers], "the tokens")
            return answers
        from piecework.engine.offline import answer_all
        from piecework.engine.sequence import Request, SamplingParameters

        each = [parameters] * len(several) if isinstance(parameters, SamplingParameters) else list(parameters)
        if len(each) != len(several):
            raise OptionError(
                f"there are {len(several)} prompts and {len(each)} sets of parameters",
                hint="give one for all, or one each",
            )
        requests = [
            Request(str(number), tuple(self.encode(prompt)), one)
            for number, (prompt, one) in enumerate(zip(several, each, strict=True))
        ]
        if self.model.ranks is None:
            return answer_all(self.engine, requests)
        from piecework.api.led import answer_together

        return answer_together(self._part, lambda engine: answer_all(engine, requests))

    @cached_property
    def engine(self) -> Engine:
        """An engine over the model, for as many prompts as there are; made when first asked for."""
        from piecework.engine.loop import Engine

        if self.model.ranks is not None:
            raise OptionError(
                f"an engine of one process was asked for, and the model is shared by {self.model.ranks.size} ranks",
                hint="call `generate` with `parameters` on every rank: one of them leads the others",
            )
        return Engine(*self._serving())

    @cached_property
    def _part(self) -> Engine | Follower:
        """What this rank has of an engine that several ranks share."""
        from piecework.api.led import part_of

        assert self.model.ranks is not None
        return part_of(*self._serving(), self.model.ranks)

    def _serving(self) -> tuple[Served, EngineOptions]:
        from piecework.api.served import serve_folder, step_function
        from piecework.engine.options import EngineOptions

        model = self.model
        most = min(EngineOptions().max_num_batched_tokens, model.max_num_batched_tokens)
        served = serve_folder(
            model.folder, step_function(model.program, model.keeps_rows), model.sites,
            dtype=model.dtype, device=model.device, keeps_rows=model.keeps_rows,
            tokenizer=self.tokenizer if model.folder.tokenizer_file is not None else None,
        )  # fmt: skip
        sequences = min(EngineOptions().max_num_sequences, most - 1)
        return served, EngineOptions(max_num_sequences=sequences, max_num_batched_tokens=most, enforce_eager=True)

    def _tell(self, token: GeneratedToken) -> None:
        """Tell of a step; the first token of an answer is that of the prefill."""
        now_ns = time.perf_counter_ns()
        name = "decode" if token.position else "prefill"
        self._observer(Phase(name=name, start_ns=now_ns - int(token.elapsed_s * 1e9), end_ns=now_ns))

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
            on_token=self._tell,
        )
        ids = generation.token_ids
        text = self.tokenizer.decode(ids) if model.folder.tokenizer_file is not None else ""
        return Completion(text, ids, prompt_ids, generation)


def _is_one(prompts: object) -> bool:
    return isinstance(prompts, str) or (isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int))
