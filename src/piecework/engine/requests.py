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
from piecework.seam.surroundings import surroundings
from piecework.seam.toolchain import cpp_compiler, toolchain
from piecework.values.artifact import Compiler
from piecework.values.digest import digest_data
from piecework.values.key import program_factors
from piecework.values.placement import Placement
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


def surroundings_of(
    device: str, compiler: str, given: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, dict[str, str]], str]:
    """Return the factors of toolchain and environment, and the C++ compiler where a compiler of that name uses one.

    `given` are the variables of `seam.surroundings.variables` that are set, and CXX.
    """
    tools = toolchain(device)
    around = surroundings(device, {name: value for name, value in given.items() if name != "CXX"})
    builds_cpp = compiler == "inductor" and tools["device"] == "cpu"
    return tools, around, cpp_compiler(given.get("CXX", "")) if builds_cpp else ""


def request_for(
    model: Mapping[str, Any],
    inputs: Any,
    make_source: Callable[[], Source],
    settings: CompileOptions,
    device: str,
    given: Mapping[str, str],
) -> Request:
    """Return the request of a source under complete options; `model` and `inputs` name them in the key.

    `given` are the environment variables that count, with their values.
    """
    compiler, passes, operators = chosen(settings, device)
    version = {"name": compiler.name, "version": compiler.version}
    tools, around, cpp = surroundings_of(device, compiler.name, given)
    factors = program_factors(
        model, inputs, settings.keyed(), version, tools, factors_of(passes), operators, around
    )
    whole = settings.mode == TRACE_ONCE
    return Request(
        factors=factors,
        make_source=make_source,
        ranges=_ranges(settings),
        split_ops=() if whole else settings.split_ops,
        split_ops_only=() if whole else settings.split_ops_only,
        merge_consecutive=settings.merge_consecutive,
        partition=settings.partition,
        split_at_guards=settings.split_at_guards,
        evaluate_guards=settings.evaluate_guards,
        compiler=compiler,
        fall_back=EagerCompiler(),
        toolchain=tools,
        passes=passes,
        environment=around,
        cpp_compiler=cpp,
        budget_s=settings.compile_budget_s,
        threads=settings.compile_threads,
        verify=settings.verify,
        debug_folder=settings.debug_folder,
    )


def _ranges(settings: CompileOptions) -> tuple[Range, ...]:
    cuts = partition(settings.ranges or (), settings.single_sizes, settings.max_num_batched_tokens)
    return cuts if settings.size_one else tuple(cut for cut in cuts if cut != Range(1, 1)) or cuts


def folder_request(
    folder: ModelFolder,
    dtype: str,
    device: str,
    settings: CompileOptions,
    load_model: LoadModel,
    given: Mapping[str, str],
) -> Request:
    """Return what is asked of the pipeline for a model folder under complete options.

    `load_model` makes the model without its weights, on a cold start alone: what it imports, a warm one does without.
    """
    identity = {**describe_folder(folder.config), "dtype": dtype, "convention": CONVENTION}
    ranks = settings.tensor_parallel_size
    make = lambda: _source(folder, dtype, device, load_model, ranks)  # noqa: E731
    return request_for(identity, CONVENTION, make, settings, device, given)


def _source(folder: ModelFolder, dtype: str, device: str, load_model: LoadModel, ranks: int) -> Source:
    among = {"placement": Placement(0, ranks)} if ranks > 1 else {}  # any rank's: what is compiled is the same
    loaded = load_model(folder.path, dtype=dtype, device=device, with_weights=False, **among)
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
