"""Several ranks give the tokens that one gives, from one artifact that was compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

import piecework as pw
from parallel.programs import options, tell, tell_each
from parallel.several_ranks import on_ranks
from piecework.api.folder import build_folder
from piecework.errors import ModelError
from tiny_models import tiny_folder

FOUR = ("llama", "qwen3", "mixtral", "gemma2")
MARGIN = 1e-5
# Two ranks for three heads of keys: the second has one, and zeros for another.
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4, "hidden_size": 36}


def check_tokens(
    folders: list[Path], ranks: int, store: Path, compiler: str, *, compiles: bool, **more: object
) -> None:
    """Compare with the model as it is, in one process."""
    alone = {folder.name: tell(folder, None, 1, "eager", {"mode": "none"}) for folder in folders}
    found = on_ranks(ranks, tell_each, folders, [store], ranks, compiler, {})
    for name, one in alone.items():
        assert min(one["margins"]) > MARGIN
        each = [rank[name] for rank in found]
        assert [rank["tokens"] for rank in each] == [one["tokens"]] * ranks, name
        assert len({rank["key"] for rank in each}) == 1
        assert sum(rank["traced"] for rank in each) == compiles, "one rank compiles"
        assert sum(rank["compiled"] > 0 for rank in each) == compiles


def test_two_ranks_start_from_what_one_process_built(tmp_path: Path) -> None:
    """No launcher is needed to build: the program knows no rank, so it is the same for all."""
    folders = [tiny_folder("mixtral", tmp_path / "mixtral"), tiny_folder("llama", tmp_path / "odd", **ODD)]
    keys = [build_folder(f, options=options(2, "eager"), store=pw.DiskStore(tmp_path / "store")).key for f in folders]
    assert len(set(keys)) == 2
    check_tokens(folders, 2, tmp_path / "store", "eager", compiles=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_two_ranks_give_the_tokens_of_one(name: str, compiler: str, tmp_path: Path) -> None:
    check_tokens([tiny_folder(name, tmp_path / name)], 2, tmp_path / "store", compiler, compiles=True)


@pytest.mark.slow
def test_further_plans(tmp_path: Path) -> None:
    """Gathered projections, packed ones, biases, an embedding alone that is divided, heads that are not."""
    others = ("phi3", "olmo2", "gpt_neox", "gpt_oss", "qwen3_moe", "qwen2")
    folders = [tiny_folder(name, tmp_path / name) for name in others]
    check_tokens(folders, 2, tmp_path / "store", "eager", compiles=True)


@pytest.mark.slow
def test_ranks_that_share_a_head(tmp_path: Path) -> None:
    """Four ranks, two heads of keys: each is on two ranks, and a vocabulary of 96 rows is divided by three."""
    folder = tiny_folder("llama", tmp_path / "llama")
    check_tokens([folder], 4, tmp_path / "store", "eager", compiles=True)


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("gpt2", 2, "`GPT2LMHeadModel` has no tensor-parallel plan"),
        ("llama", 3, "4 query heads and 2 key-value heads, which 3 ranks cannot share"),
        ("llama", 8, "4 query heads and 2 key-value heads, which 8 ranks cannot share"),
    ],
)
def test_what_is_not_divided_is_refused(name: str, ranks: int, text: str, tmp_path: Path) -> None:
    folder = tiny_folder(name, tmp_path / name)
    with pytest.raises(ModelError) as caught:
        build_folder(folder, options=options(ranks, "eager"), store=pw.MemoryStore())
    assert text in caught.value.message
    assert caught.value.hint


def test_a_process_alone_is_told_how_ranks_are_started(tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path / "llama")
    with pytest.raises(pw.errors.OptionError) as caught:
        pw.LLM(folder, options=options(2, "eager"), store=pw.MemoryStore())
    assert caught.value.message == "the model is shared by 2 ranks, and this process was started alone"
    assert "torchrun --nproc-per-node=2 -m piecework" in caught.value.hint
