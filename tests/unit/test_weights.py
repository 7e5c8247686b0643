"""Weights by name from files: shards, ties, expressions, and files that are not what they should be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from piecework.errors import BindError
from piecework.models.weight_files import open_weights
from piecework.models.weights import Expected, assign, load_weights, sources_of

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4), "e.0": torch.full((2,), 5.0)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        file = f"model-{number}.safetensors"
        save_file({name: tensor}, tmp_path / file)
        weight_map[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_a_folder_a_file_an_index_and_a_state_dict_give_the_same(single: Path) -> None:
    for source in (single, str(single), single / "model.safetensors", TENSORS):
        loaded = load_weights(source, ["b.weight", "a.weight"])
        assert list(loaded) == ["b.weight", "a.weight"]
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in loaded.items())


def test_shards(sharded: Path) -> None:
    for source in (sharded, sharded / "model.safetensors.index.json"):
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load_weights(source, list(TENSORS)).items())
    (sharded / "model-1.safetensors").unlink()
    assert set(load_weights(sharded, ["a.weight"])) == {"a.weight"}
    with pytest.raises(BindError, match="the shard `model-1.safetensors` that the index names is not in"):
        load_weights(sharded, ["b.weight"])
    save_file({"other": torch.ones(1)}, sharded / "model-1.safetensors")
    with pytest.raises(BindError, match="`model-1.safetensors` does not hold the weight `b.weight`"):
        load_weights(sharded, ["b.weight"])


def test_tied_names_share_one_tensor(single: Path) -> None:
    loaded = load_weights(single, ["a.weight", "head.weight"], rules={"head.weight": "a.weight"})
    assert loaded["head.weight"] is loaded["a.weight"]
    # A state dict of the model's own names needs no rule.
    own = {**TENSORS, "head.weight": TENSORS["a.weight"]}
    assert torch.equal(
        load_weights(own, ["head.weight"], rules={"head.weight": "absent"})["head.weight"], TENSORS["a.weight"]
    )


RULES: dict[str, Any] = {
    "stack": ["stack", 0, ["b.weight", "b.weight"]],
    "cat": ["cat", 1, [["transpose", 0, 1, "a.weight"], ["stack", 1, ["c", "c"]]]],
    "chunk": ["chunk", 1, 1, 3, "a.weight"],
}


def test_expressions() -> None:
    tensors = {**TENSORS, "c": torch.tensor([7.0, 8.0, 9.0])}
    loaded = load_weights(tensors, list(RULES), rules=RULES)
    assert loaded["stack"].tolist() == [[1.0] * 4] * 2
    assert loaded["cat"].tolist() == [[0, 3, 7, 7], [1, 4, 8, 8], [2, 5, 9, 9]]
    assert loaded["chunk"].tolist() == [[1.0], [4.0]]
    assert loaded["chunk"].is_contiguous()
    assert sources_of(RULES["cat"]) == ["a.weight", "c", "c"]
    with pytest.raises(BindError, match="asks for `fold`, which this release does not know"):
        load_weights(tensors, ["x"], rules={"x": ["fold", "a.weight"]})


def test_floats_are_cast_and_nothing_else(single: Path) -> None:
    loaded = load_weights(single, {"a.weight": Expected((2, 3), torch.bfloat16)})
    assert torch.equal(loaded["a.weight"], TENSORS["a.weight"].bfloat16())
    for got, want in ((torch.ones(4).long(), torch.float32), (torch.ones(4).to(torch.float8_e4m3fn), torch.bfloat16)):
        with pytest.raises(BindError, match=re.escape(f"the weight `b` is `{got.dtype}`")):
            load_weights({"b": got}, {"b": Expected((4,), want)})


def test_a_wrong_shape_names_weight_expected_and_got(single: Path) -> None:
    with pytest.raises(BindError) as caught:
        load_weights(single, {"a.weight": ((3, 2), torch.float32)})
    assert str(caught.value) == (
        "the weight `a.weight` has shape [2, 3] in `model.safetensors`, and [3, 2] was expected\n"
        "hint: the checkpoint and the configuration are of different models"
    )
    assert caught.value.facts == {"name": "a.weight", "expected": [3, 2], "got": [2, 3]}
    with pytest.raises(BindError, match=r"the weight `tied` has shape \[2, 3\]"):
        load_weights(
            single,
            {"a.weight": ((2, 3), torch.float32), "tied": ((9,), torch.float32)},
            rules={"tied": "a.weight"},
        )


def test_a_missing_name(single: Path) -> None:
    with pytest.raises(BindError) as caught:
        load_weights(single, ["c.weight"])
    assert str(caught.value) == (
        "the weight `c.weight` is not in `model.safetensors`\n"
        "hint: the checkpoint is incomplete or of another model; it has `a.weight`, `b.weight`"
    )
    with pytest.raises(BindError, match="`x` is made of 3 others, of which `e.1` is not in"):
        load_weights(single, ["x"], rules={"x": ["stack", 0, ["e.0", "e.1", "e.2"]]})


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_file_cut_short(keep: int, single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BindError, match="`model.safetensors` cannot be read as safetensors"):
        load_weights(single, ["a.weight"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no index of shards"),
        ("[]", "is no index of shards"),
        ('{"weight_map": 3}', "is no index of shards"),
        (
            '{"weight_map": {"a": "../x.safetensors"}}',
            "names the file `../x.safetensors`, which is not a plain file name",
        ),
    ],
)
def test_a_broken_index(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BindError, match=re.escape(said)):
        open_weights(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="there are no weights at"):
        open_weights(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BindError, match="it has `pytorch_model.bin`, which is not read"):
        open_weights(tmp_path)


def test_assign_keeps_ties_and_copies_nothing() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight, bias = torch.ones(3, 3), torch.zeros(3)
    tensors: dict[str, Tensor] = {"0.weight": weight, "1.weight": weight, "1.bias": bias, "2.running_mean": bias}
    assign(model, tensors)
    assert model[0].weight is model[1].weight
    assert model[0].weight.data_ptr() == weight.data_ptr() and not model[0].weight.requires_grad
    assert model[2].running_mean is bias
    with pytest.raises(BindError, match="the model has no weight `1.scale`"):
        assign(model, {"1.scale": bias})
