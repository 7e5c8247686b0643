"""Several ranks give the tokens that one gives, from one artifact that was compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.programs import tell, tell_each
from parallel.several_ranks import on_ranks
from tiny_models import tiny_folder

FOUR = ("llama", "qwen3", "mixtral", "gemma2")
MARGIN = 1e-5


def check(folders: list[Path], ranks: int, compiler: str, tmp_path: Path, **more: object) -> None:
    alone = {folder.name: tell(folder, None, 1, "eager", {"mode": "none"}) for folder in folders}
    found = on_ranks(ranks, tell_each, folders, [tmp_path / "store"], ranks, compiler, more)
    for name, one in alone.items():
        assert min(one["margins"]) > MARGIN
        each = [rank[name] for rank in found]
        assert [rank["tokens"] for rank in each] == [one["tokens"]] * ranks
        assert len({rank["key"] for rank in each}) == 1
        assert sum(rank["compiled"] for rank in each) == each[0]["compiled"] > 0, "one rank compiles"
        assert sum(rank["traced"] for rank in each) == 1


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    check([tiny_folder(name, tmp_path / name) for name in FOUR], 2, "eager", tmp_path)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_under_inductor(tmp_path: Path) -> None:
    check([tiny_folder(name, tmp_path / name) for name in FOUR], 2, "inductor", tmp_path)


@pytest.mark.slow
def test_further_plans(tmp_path: Path) -> None:
    """Gathered projections, packed ones, biases, an embedding alone that is divided, heads that are not."""
    others = ("phi3", "olmo2", "gpt_neox", "gpt_oss", "qwen3_moe", "qwen2", "granite", "smollm3")
    check([tiny_folder(name, tmp_path / name) for name in others], 2, "eager", tmp_path)


def test_heads_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """Two ranks for three heads of keys: the second has one, and zeros for another."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
    odd = tiny_folder("llama", tmp_path / "odd", hidden_size=36, **heads)
    check([odd], 2, "eager", tmp_path)
