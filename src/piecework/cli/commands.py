"""The commands that start a model: generate and build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from piecework.cli.flags import (
    CAPTURE_DEFAULTS,
    COMPILE_DEFAULTS,
    MODEL_DEFAULTS,
    OUTPUT_DEFAULTS,
    STORE_DEFAULTS,
    WATCH_DEFAULTS,
    CaptureFlags,
    CompileFlags,
    Model,
    ModelFlags,
    OutputFlags,
    Override,
    StoreFlags,
    WatchFlags,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from piecework.api.llm import LLM, Completion
    from piecework.cli.start import Start
    from piecework.events import Observer
    from piecework.values.record import Record

def generate(
    model: Model,
    /,
    *,
    prompt: Annotated[
        list[str] | None, Parameter(help="Text to continue; give it again for more.", negative="", metavar="TEXT")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        Parameter(help="Token ids to continue, as 1,2,3, where there is no tokenizer.", negative="", metavar="IDS"),
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Tokens to generate at most.", metavar="N")] = 16,
    ignore_eos: Annotated[bool, Parameter(help="Go on after a token that ends the text.", negative="")] = False,
    override: Override = None,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    capture_flags: CaptureFlags = CAPTURE_DEFAULTS,
    watch_flags: WatchFlags = WATCH_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Compile what is missing, then continue each prompt greedily."""
    from piecework.cli.capture import check_capture
    from piecework.cli.config import parse_numbers
    from piecework.cli.ranks import sharing
    from piecework.cli.start import starting
    from piecework.errors import OptionError

    prompts: list[Any] = list(prompt or [])
    prompts += [parse_numbers(text, "--prompt-ids") for text in prompt_ids or []]
    if not prompts:
        raise OptionError("there is no prompt", hint="give `--prompt TEXT` or `--prompt-ids 1,2,3`")
    if max_tokens < 1:
        raise OptionError(f"`--max-tokens` is `{max_tokens}`", hint="give a whole number from 1 up")
    with starting(compile_flags, store_flags, watch_flags) as start:
        check_capture(capture_flags, model_flags.device, start.settings.options)
        tokenizer = _tokenizer_of(model, start.observer, offline=model_flags.offline)
        with sharing(start.settings.options.tensor_parallel_size, model_flags.device) as ranks:
            llm = _open(model, model_flags, start, tokenizer=tokenizer, ranks=ranks, **altered_by(override))
            completions = llm.generate(prompts, max_tokens=max_tokens, ignore_eos=ignore_eos)
    if ranks is not None and ranks.rank > 0:
        return  # all ranks have the same answer, and one of them gives it
    found = _answer(completions, start, llm.model.record)
    if output.json:
        from piecework.cli.output import print_json

        print_json(found)
        return
    for completion in completions:
        print(completion.text or ",".join(map(str, completion.token_ids)))
    _summarize(found)


def _open(model: str, flags: ModelFlags, start: Start, **more: Any) -> LLM:
    """Open a model as its flags and the settings say."""
    from piecework.api.llm import LLM

    return LLM(
        model, dtype=flags.dtype, device=flags.device, offline=flags.offline, options=start.settings.options,
        store=start.store, observer=start.observer, **more,
    )  # fmt: skip


def _tokenizer_of(model: str | Path, observer: Observer, *, offline: bool) -> Tokenizer | None:
    """Read the tokenizer, where there is one, while torch's libraries are being loaded: it needs none of them."""
    from piecework.api.location import locate
    from piecework.engine.text import read_tokenizer
    from piecework.events import phase
    from piecework.models.folder import open_folder
    from piecework.seam.deferred import defer_torch
    from piecework.seam.preload import preload_torch

    folder = open_folder(locate(model, offline=offline))
    defer_torch()
    preload_torch()
    if folder.tokenizer_file is None:
        return None
    with phase(observer, "tokenizer"):
        return read_tokenizer(folder)


def altered_by(override: Path | None) -> dict[str, Any]:
    """Return the change of the request that edited pieces are; nothing is imported where there are none."""
    if override is None:
        return {}
    from piecework.diagnostics.dump import altered

    return {"alter": altered(override=override)}


def _answer(completions: list[Completion], start: Start, record: Record | None) -> dict[str, Any]:
    """Return what `generate --json` prints: the first answer at the top, all of them below."""
    from piecework.diagnostics.process_start import seconds_since_start

    first = completions[0].generation
    later_s = sum(token.elapsed_s for c in completions for token in c.generation.tokens) - first.first_token_s
    answers = [
        {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "prompt_ids": completion.prompt_ids,
            "finished": completion.generation.finished,
            "margins": completion.generation.margins,
        }
        for completion in completions
    ]
    timings = {
        **start.counters.timings(),
        "first_token_s": first.first_token_s,
        "tokens_per_s": first.tokens_per_s,
        "start_to_first_token_s": max(0.0, seconds_since_start() - later_s),
    }
    return {**answers[0], **_counts(start, record), "timings": timings, "completions": answers}


def _counts(start: Start, record: Record | None) -> dict[str, Any]:
    """Return how the program was cut and what its start did."""
    from piecework.events import phase

    with phase(start.observer, "answer"):
        from piecework.diagnostics.cuts import count_cuts

    counters = start.counters
    return {
        **(count_cuts(record, start.store) if record is not None else {}),
        "mode": start.settings.options.mode,
        "store": start.settings.store.store,
        "compiled": counters.compiled,
        "reused": counters.reused,
        "loaded": counters.loaded,
        "bytes": counters.loaded_bytes or counters.compiled_bytes,
        "misses": counters.misses,
    }


def _summarize(found: dict[str, Any]) -> None:
    """Tell on standard error what a start did, in two lines."""
    import sys

    from piecework.cli.output import size_text

    timings = found["timings"]
    if "regions" in found:
        print(
            f"regions {found['regions']}, sites {found['sites']}, distinct {found['distinct']}; "
            f"compiled {found['compiled']}, loaded {found['loaded']} artifacts ({size_text(found['bytes'])}); "
            f"trace {timings['trace_s']:.2f} s, compile {timings['compile_s']:.2f} s",
            file=sys.stderr,
        )
    if "tokens_per_s" in timings:
        print(
            f"first token after {timings['first_token_s']:.3f} s of work, {timings['start_to_first_token_s']:.2f} s "
            f"after the start; then {timings['tokens_per_s']:.1f} tokens a second",
            file=sys.stderr,
        )


def build(
    model: Model,
    /,
    *,
    override: Override = None,
    model_flags: ModelFlags = MODEL_DEFAULTS,
    compile_flags: CompileFlags = COMPILE_DEFAULTS,
    store_flags: StoreFlags = STORE_DEFAULTS,
    watch_flags: WatchFlags = WATCH_DEFAULTS,
    output: OutputFlags = OUTPUT_DEFAULTS,
) -> None:
    """Fill the store and run nothing; needs the model's configuration, not its weights."""
    from piecework.cli.output import print_json
    from piecework.cli.start import starting

    with starting(compile_flags, store_flags, watch_flags) as start:
        from piecework.api.folder import build_folder
        from piecework.store.disk import DiskStore
        from piecework.store.layout import is_remote

        if isinstance(start.store, DiskStore):
            start.store.check_writable()
        built = build_folder(
            model,
            dtype=model_flags.dtype,
            device=model_flags.device,
            options=start.settings.options,
            store=start.store,
            observer=start.observer,
            offline=model_flags.offline,
            **altered_by(override),
        )
        if is_remote(str(start.settings.store.store)):
            from piecework.cli.store_remote import finish_writing

            finish_writing(start.store)
        from piecework.diagnostics.explain import explain_record
        from piecework.events import phase

        with phase(start.observer, "answer"):
            stored = explain_record(built.key, built.record, start.store, start.store)
    found = {
        "key": built.key,
        **_counts(start, built.record),
        "bytes": stored["bytes"],
        "timings": start.counters.timings(),
        "fall_backs": [
            {"piece": piece["number"], "range": box, "reason": artifact["fall_back"]}
            for piece in stored["pieces"]
            for box, artifact in piece["artifacts"].items()
            if artifact.get("fall_back")
        ],
    }
    if output.json:
        print_json(found)
        return
    print(built.key)
    _summarize(found)
