"""The sixteen architectures through the adapter: same logits as Transformers' own, one graph, three attention nodes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from piecework.errors import OptionError
from piecework.models.folder import KvSite, kv_sites, open_folder
from piecework.models.hugging_face import LoadedModel, load_model, resolve_dtype
from piecework.models.skeleton import build_skeleton, find_sites
from piecework.models.weights import load_weights
from piecework.ops import PagedCache, Step, step_context
from tiny_models import ARCHITECTURES, VOCABULARY, WINDOW, tiny_config, tiny_folder, tiny_model

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
PAGE = 8
PAGES = [[4, 2, 5], [0, 7, 1]]
FLOOR = 4 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    class Folders(dict[str, Path]):
        def __missing__(self, architecture: str) -> Path:
            self[architecture] = tiny_folder(architecture, tmp_path_factory.mktemp(architecture))
            return self[architecture]

    yield Folders()


def caches(loaded: LoadedModel) -> dict[str, PagedCache]:
    return {
        site.name: PagedCache.allocate(8, PAGE, site.num_kv_heads, site.head_dim, dtype=loaded.dtype)
        for site in loaded.sites
    }


def step_of(parts: list[tuple[int, int, int]], sites: dict[str, PagedCache], padding: int = 0) -> Step:
    """Make a step of (sequence, first position, last position) parts."""
    slots = [PAGES[b][p // PAGE] * PAGE + p % PAGE for b, first, last in parts for p in range(first, last)]
    starts = [0]
    for _, first, last in parts:
        starts.append(starts[-1] + last - first)
    return Step.from_lists(
        slots=slots,
        query_starts=starts,
        sequence_lengths=[last for _, _, last in parts],
        page_table=[PAGES[b] for b, _, _ in parts],
        sites=sites,
        num_padded=len(slots) + padding,
    )


def relative_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Relative L2 error of each row.

    Tensors:
        got, exact  [T, V]  any
        ->          [T]     f64
    """
    return (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_and_decode_give_transformers_own_logits(architecture: str, folders: dict[str, Path]) -> None:
    """Two sequences of 20 and 15 tokens, beyond the windows: prefill in chunks, decode, mixed, and padded."""
    loaded = load_model(folders[architecture])
    reference = tiny_model(architecture)
    exact_model = tiny_model(architecture).double()
    if architecture in EXPERTS:
        exact_model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    torch.manual_seed(1)
    lengths = [20, 15]
    assert min(lengths) > WINDOW
    ids = [torch.randint(3, VOCABULARY, (length,)) for length in lengths]
    sites = caches(loaded)
    got: list[list[Tensor]] = [[], []]
    steps = [
        ([(0, 0, 11)], 0),
        ([(1, 0, 9), (0, 11, 12)], 3),  # a prompt beside a token of decoding, and padding
        ([(0, 12, 14), (1, 9, 13)], 0),
        *[([(0, p, p + 1)], 0) for p in range(14, 18)],
        ([(0, 18, 19), (1, 13, 14)], 2),
        ([(0, 19, 20), (1, 14, 15)], 0),
    ]
    with torch.no_grad():
        for parts, padding in steps:
            tokens = torch.cat([ids[b][first:last] for b, first, last in parts] + [torch.zeros(padding).long()])
            positions = torch.cat(
                [torch.arange(first, last) for _, first, last in parts] + [torch.zeros(padding).long()]
            )
            count = len(tokens) - padding
            with step_context(step_of(parts, sites, padding)):
                logits = loaded.model(tokens[None], positions[None], torch.arange(count))
            assert logits.shape == (1, count, VOCABULARY)
            row = 0
            for b, first, last in parts:
                got[b].append(logits[0, row : row + last - first])
                row += last - first
        for b in range(2):
            own = reference(input_ids=ids[b][None], use_cache=False).logits[0]
            exact = exact_model(input_ids=ids[b][None], use_cache=False).logits[0]
            errors, allowed = relative_errors(torch.cat(got[b]), exact), relative_errors(own, exact).max() * 2
            assert errors.max() <= max(FLOOR, allowed.item())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_graph_with_three_attention_nodes(architecture: str, folders: dict[str, Path]) -> None:
    loaded = load_model(folders[architecture])
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(loaded.model, backend=keep, fullgraph=True)
    sites = caches(loaded)
    for tokens, rows in ((17, 3), (23, 2), (9, 5)):
        inputs = {
            "input_ids": torch.randint(3, VOCABULARY, (1, tokens)),
            "position_ids": torch.arange(tokens)[None],
            "logits_to_keep": torch.arange(rows),
        }
        for name, dims in loaded.dynamic.items():
            for dim in dims:
                torch._dynamo.mark_dynamic(inputs[name], dim)
        with torch.no_grad(), step_context(step_of([(0, 0, tokens)], sites)):
            torch.testing.assert_close(compiled(**inputs), loaded.model(**inputs), rtol=0, atol=0)
    (graph,) = graphs
    for name in ("attention", "kv_update"):
        assert sum(f"piecework.{name}" in str(node.target) for node in graph.graph.nodes) == 3
    between = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    pairs = zip(between, between[1:], strict=False)
    assert sum("kv_update" in before and "piecework.attention" in after for before, after in pairs) == 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_buffers_and_sites_without_transformers_loading(architecture: str, folders: dict[str, Path]) -> None:
    folder = folders[architecture]
    loaded = load_model(folder)
    reference = tiny_model(architecture)
    for kind in ("named_parameters", "named_buffers"):
        own = dict(getattr(reference, kind)(remove_duplicate=False))
        ours = dict(getattr(loaded.model, kind)(remove_duplicate=False))
        assert ours.keys() == own.keys()
        for name, tensor in own.items():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    for name, origin in reference.all_tied_weights_keys.items():
        assert loaded.model.get_parameter(name) is loaded.model.get_parameter(origin)
    # What a warm start does: the names a record asks for, by its rules, and the caches by the configuration alone.
    rules = json.loads(json.dumps(loaded.rules))
    again = load_weights(folder, loaded.expected, rules=rules)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again[name], tensor), name
    of_config = kv_sites(open_folder(folder).config)
    assert [(site.name, site.num_kv_heads, site.head_dim) for site in of_config] == [
        (site.name, site.num_kv_heads, site.head_dim) for site in loaded.sites
    ]
    assert all(
        site.sliding_window in (0, seen.sliding_window) for site, seen in zip(of_config, loaded.sites, strict=True)
    )


def test_a_build_without_weights_allocates_none(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama"] / "config.json", tmp_path)
    loaded = load_model(tmp_path, with_weights=False)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    assert not any(buffer.is_meta for buffer in loaded.model.buffers())
    assert loaded.sites == tuple(KvSite(f"layers.{layer}", 2, 8) for layer in range(3))


def test_eight_billion_parameters_take_no_memory() -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    skeleton = build_skeleton(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in skeleton.parameters()) > 8e9
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert len(find_sites(skeleton)) == 32


def test_two_models_of_one_configuration_do_not_switch_each_other() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    skeletons = [build_skeleton(config, dtype=torch.float32) for _ in range(2)]
    assert config.to_dict() == before and config._attn_implementation != "piecework"
    skeletons[1].set_attn_implementation("eager")
    assert skeletons[0].config._attn_implementation == "piecework"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_is_cast(dtype: torch.dtype, folders: dict[str, Path]) -> None:
    loaded = load_model(folders["llama"], dtype=dtype)
    reference = tiny_model("llama").to(dtype)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    with torch.no_grad(), step_context(step_of([(0, 0, 12)], caches(loaded))):
        logits = loaded.model(torch.arange(3, 15)[None], torch.arange(12)[None], torch.tensor([11, 3]))
    assert logits.dtype == dtype and logits.isfinite().all()


def test_dtypes_by_name() -> None:
    assert resolve_dtype("auto", {"dtype": "bfloat16"}) is torch.bfloat16
    assert resolve_dtype("auto", {"torch_dtype": "float16"}) is torch.float16
    assert resolve_dtype("auto", {}) is torch.float32
    for name in ("int8", "float8_e4m3fn", "mm", "nonsense"):
        with pytest.raises(OptionError, match=f"`{name}` is no dtype"):
            resolve_dtype(name, {})


def test_values_narrower_than_keys() -> None:
    """Multi-head latent attention: heads of 24 for keys, of 16 for values."""
    config = AutoConfig.for_model(
        "deepseek_v3",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    skeleton = build_skeleton(config, dtype=torch.float32)
    assert [(site.num_kv_heads, site.head_dim) for site in find_sites(skeleton)] == [(4, 24)] * 3
