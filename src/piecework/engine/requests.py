"""What is asked of the pipeline for a model: by whoever opens it, or compiles it in a process beside a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piecework.compilers import select_compiler
from piecework.compilers.eager import EagerCompiler
from piecework.models.folder import ModelFolder
from piecework.ops.choice import choose
from piecework.options import TRACE_ONCE, CompileOptions
from piecework.passes import PieceRewriting, resolve_passes
from piecework.passes.operators import operator_passes
from piecework.pipeline import Request, Source
from piecework.seam.toolchain import toolchain
from piecework.values.artifact import Compiler
from piecework.values.digest import digest_data
from piecework.values.key import program_factors
from piecework.values.rewriting import PIECE, GraphPass, factors_of
from piecework.values.shapes import Range, partition

LoadModel = Callable[..., Any]
CONVENTION = "flat tokens 1"  # of the adapter's inputs and operators; a change here misses every record made before

# Keys of a configuration that say where it came from or who wrote it, and not what the model computes.
_NOT_COMPUTED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")


def chosen(settings: CompileOptions, device: str) -> tuple[Compiler, tuple[GraphPass, ...], dict[str, str]]:
    """Return the compiler, the passes and the operators of complete options; passes on a piece go into the compiler.

    The passes that operators ask for come last: they see what the others made of the graph.
    """
    choices = choose(settings.custom_ops, device)
    passes = (*resolve_passes(settings.passes or ()), *operator_passes(choices))
    on_pieces = [one for one in passes if one.runs_on == PIECE]
    rewrite = PieceRewriting(on_pieces) if on_pieces else None
    operators = {name: choice.as_factor() for name, choice in choices.items()}
    compiler = select_compiler(settings.compiler, rewrite, autotune=bool(settings.autotune))
    return compiler, passes, operators


def request_for(
    factors: Mapping[str, Any],
    make_source: Callable[[], Source],
    settings: CompileOptions,
    compiler: Compiler,
    passes: tuple[GraphPass, ...],
    tools: Mapping[str, str],
) -> Request:
    """Return the request of a source under complete options."""
    whole = settings.mode == TRACE_ONCE
    return Request(
        factors=factors,
        make_source=make_source,
        ranges=_ranges(settings),
        split_ops=() if whole else settings.split_ops,
        split_ops_only=() if whole else settings.split_ops_only,
        merge_consecutive=settings.merge_consecutive,
        split_at_guards=settings.split_at_guards,
        evaluate_guards=settings.evaluate_guards,
        compiler=compiler,
        fall_back=EagerCompiler(),
        toolchain=tools,
        passes=passes,
        budget_s=settings.compile_budget_s,
        threads=settings.compile_threads,
        verify=settings.verify,
        debug_folder=settings.debug_folder,
    )


def _ranges(settings: CompileOptions) -> tuple[Range, ...]:
    cuts = partition(settings.ranges or (), settings.single_sizes, settings.max_num_batched_tokens)
    return cuts if settings.size_one else tuple(cut for cut in cuts if cut != Range(1, 1)) or cuts


def folder_request(
    folder: ModelFolder, dtype: str, device: str, settings: CompileOptions, load_model: LoadModel
) -> Request:
    """Return what is asked of the pipeline for a model folder under complete options.

    `load_model` makes the model without its weights, on a cold start alone: what it imports, a warm one does without.
    """
    tools = toolchain(device)
    compiler, passes, operators = chosen(settings, device)
    identity = {**describe_folder(folder.config), "dtype": dtype, "convention": CONVENTION}
    version = {"name": compiler.name, "version": compiler.version}
    factors = program_factors(identity, CONVENTION, settings.keyed(), version, tools, factors_of(passes), operators)
    return request_for(factors, lambda: _source(folder, dtype, device, load_model), settings, compiler, passes, tools)


def _source(folder: ModelFolder, dtype: str, device: str, load_model: LoadModel) -> Source:
    loaded = load_model(folder.path, dtype=dtype, device=device, with_weights=False)
    notes = {
        "sites": [vars(site) for site in loaded.sites],
        "keeps_rows": loaded.keeps_rows,
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    return Source(loaded.model, loaded.example_inputs, loaded.dynamic, device, loaded.rules, notes)


def describe_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names a model given as a folder: its class and a digest of its configuration."""
    kept = {name: value for name, value in config.items() if name not in _NOT_COMPUTED}
    return {
        "class": "".join(config.get("architectures") or [str(config.get("model_type"))]),
        "config": digest_data(kept),
    }
