"""What once broke the straight line: small inputs that ended in a wrong refusal, or in an error without a hint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import piecework as pw
from piecework.api.llm import LLM
from piecework.cli.main import run
from tiny_models import tiny_folder

library = torch.library.Library("broken", "DEF")
library.define("double(Tensor x) -> Tensor")


@pw.split_op("broken::double")
def double(x: torch.Tensor) -> torch.Tensor:
    """Double it."""
    return x * 2


library.impl("double", double, "CPU")
torch.library.register_fake("broken::double", torch.empty_like, lib=library)

EAGER = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 64),))
IDS = ("--prompt-ids", "5,6,7", "--max-tokens", "2", "--compiler", "eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in float32 that every test copies."""
    return tiny_folder("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(folder: Path, file: str, **values: Any) -> None:
    """Set values in one of a folder's JSON files."""
    path = folder / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **values}))


def test_a_folder_is_served_in_another_dtype_than_its_files_hold(folder: Path) -> None:
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float32}
    eager = LLM(folder, dtype="float64", options=pw.CompileOptions(mode="none"))
    wanted = eager.generate([5, 6, 7], max_tokens=4, ignore_eos=True)[0].token_ids
    store = pw.MemoryStore()
    for _ in ("cold", "warm"):
        llm = LLM(folder, dtype="float64", options=EAGER, store=store)
        assert llm.model.program.weights["model.embed_tokens.weight"].dtype == torch.float64  # type: ignore[attr-defined]
        assert llm.generate([5, 6, 7], max_tokens=4, ignore_eos=True)[0].token_ids == wanted


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "nested too deeply": (lambda f: (f / "config.json").write_text("[" * 100_000) and None, "is not JSON"),
    "no causal model": (lambda f: edit(f, "config.json", model_type="t5"), "cannot build the model"),
    "a word for a size": (lambda f: edit(f, "config.json", hidden_size="big"), "cannot read the configuration"),
    "a negative size": (lambda f: edit(f, "config.json", hidden_size=-32), "Transformers cannot"),
    "an unknown activation": (lambda f: edit(f, "config.json", hidden_act="zzz"), "cannot build the model"),
    "layer types no list": (lambda f: edit(f, "config.json", layer_types=3), "not a list of names"),
    "an end that is a word": (lambda f: edit(f, "generation_config.json", eos_token_id="x"), "`eos_token_id`"),
    "an end that is nested": (lambda f: edit(f, "generation_config.json", eos_token_id=[[1]]), "`eos_token_id`"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_configuration_is_an_error_with_a_hint(
    damage: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, said = DAMAGES[damage]
    spoil(copied)
    assert run(["generate", str(copied), *IDS, "--store", "memory", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["class"] == "ModelError"
    assert said in printed.err
    assert "hint: " in printed.err and "--debug" not in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize("text", ["{", "{}"])
def test_a_damaged_tokenizer_is_an_error_with_a_hint(
    text: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "tokenizer.json").write_text(text)
    assert run(["generate", str(copied), "--prompt", "x", "--compiler", "eager", "--store", "memory"]) == 1
    printed = capsys.readouterr()
    assert "`tokenizer.json` in" in printed.err and "--prompt-ids" in printed.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-num-batched-tokens", "1"), "no size of dimension `rows`"),
        (("--max-num-batched-tokens", str(1 << 40)), "give a whole number from 1 to"),
        (("--device", "meta"), "does not run on `meta`"),
        (("--compilation-config", '{"lazy_sizes": [-3]}'), "`lazy_sizes`"),
    ],
)
def test_an_option_outside_its_bounds_is_a_usage_error(
    flags: tuple[str, str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(folder), *IDS, "--store", "memory", *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and "hint: " in printed.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_there_is_a_usage_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder), *IDS, "--store", "memory", "--device", "cuda"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


class SizeAlone(nn.Module):
    """It returns a number made of its input's size, and nothing else."""

    def forward(self, x: torch.Tensor) -> int:
        return x.shape[0] * 2


@pytest.mark.parametrize("passes", [(), ("no_ops",), ("no_ops", "merge_linears_everywhere")])
def test_a_model_of_sizes_alone_counts(passes: tuple[str, ...]) -> None:
    options = dataclasses.replace(EAGER, passes=passes)
    example = (torch.randn(5, 8),)
    program = pw.compile(SizeAlone(), example, dynamic={"x": {0: "tokens"}}, options=options, store=pw.MemoryStore())
    assert [program(torch.randn(tokens, 8)) for tokens in (1, 7)] == [2, 14]


class Mismatched(nn.Module):
    """It fails at every size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


def test_a_forward_that_fails_is_told_once_and_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pw.errors.TraceError, match="forward fails at .*test_broken.py"):
        pw.compile(
            Mismatched(), (torch.randn(5, 8),), dynamic={"x": {0: "tokens"}}, options=EAGER, store=pw.MemoryStore()
        )
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("weight", "said"), [(1, "is a int"), (torch.empty(8, 8, device="meta"), "tensor without values")]
)
def test_a_weight_that_holds_no_values_is_named(weight: Any, said: str) -> None:
    store, model = pw.MemoryStore(), nn.Linear(8, 8, bias=False)
    program = pw.compile(model, (torch.randn(5, 8),), dynamic={"input": {0: "tokens"}}, options=EAGER, store=store)
    with pytest.raises(pw.errors.BindError, match=f"`weight` {said}|`weight` is a {said}"):
        pw.load(store, key=program.key, weights={"weight": weight})


class Doubled(nn.Module):
    """A layer before an operator of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.broken.double(self.layer(x))  # type: ignore[no-any-return]


def test_a_model_with_an_operator_compiles_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = Doubled(), torch.randn(5, 8)
        program = pw.compile(model, (x,), dynamic={"x": {0: "tokens"}}, options=EAGER, store=pw.MemoryStore())
        assert torch.equal(program(x), model(x))
    with torch.no_grad():
        assert torch.equal(program(torch.ones(3, 8)), model(torch.ones(3, 8)))
