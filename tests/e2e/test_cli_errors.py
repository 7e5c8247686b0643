"""What users get wrong: each a sentence, a hint, the design's exit code, nothing on standard output, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from e2e.command import Done, llama_folder, piecework, piecework_process

EAGER = ("--compiler", "eager", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("errors") / "store"
    assert piecework("build", model, "--store", folder, *EAGER).code == 0
    return folder


@pytest.fixture
def damaged(model: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, change: Callable[[bytes], bytes] | None) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(model, folder)
        if change is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(change((folder / name).read_bytes()))
        return folder

    return make


def assert_told(done: Done, code: int, *said: str) -> None:
    """Hold an error to its form."""
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    told = done.err[done.err.index("error: ") :]
    assert "\nhint: " in told
    for words in said:
        assert words in told, told


def generate(model: Path | str, store: Path | str, *more: str) -> Done:
    return piecework("generate", model, "--prompt-ids", "5,6,7", "--max-tokens", "2", "--store", store, *EAGER, *more)


def test_a_missing_folder(store: Path, tmp_path: Path) -> None:
    assert_told(generate(tmp_path / "nowhere", store), 1, f"there is no model folder at `{tmp_path / 'nowhere'}`")
    assert_told(generate("some-name", store, "--offline"), 1, "some-name")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:40], "`config.json` in"),
        (lambda data: b"", "`config.json` in"),
        (lambda data: b"[1, 2]", "holds a list, not an object"),
        (lambda data: b"{}", "has no `model_type`"),
        (None, "there is no `config.json`"),
    ],
    ids=["truncated", "empty", "a list", "no type", "none"],
)
def test_a_corrupt_config(damaged: Any, store: Path, change: Any, said: str) -> None:
    assert_told(generate(damaged("config.json", change), store), 1, said)


@pytest.mark.parametrize(
    "change", [lambda d: d[: len(d) // 2], lambda d: d[:4], lambda d: b"", None], ids=["half", "four", "empty", "none"]
)
def test_truncated_weights(damaged: Any, store: Path, change: Any) -> None:
    assert_told(generate(damaged("model.safetensors", change), store), 1, "model")


def test_weights_of_another_shape_or_missing(damaged: Any, store: Path) -> None:
    folder = damaged("model.safetensors", lambda data: data)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][:-1].contiguous()}, folder / "model.safetensors")
    assert_told(generate(folder, store), 1, f"`{name}`")
    save_file({other: tensor for other, tensor in weights.items() if other != name}, folder / "model.safetensors")
    assert_told(generate(folder, store), 1, f"`{name}`")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--split-ops", "piecework::atention"), ("`piecework::atention`", "did you mean `piecework::attention`?")),
        (("--split-ops-only", "nothing::here"), ("`nothing::here`",)),
        (("--mode", "piecwise"), ("mode `piecwise` is unknown", "did you mean `piecewise`?")),
        (("--mode", "7"), ("mode `7` is unknown",)),
        (("--compiler", "inductr"), ("`inductr`", "did you mean `inductor`?")),
        (("-O9",), ("optimization level `9` is unknown",)),
        (("--optimization-level", "x"), ("optimization-level",)),
        (("--single-sizes", "4,x"), ("`--single-sizes` is `4,x`",)),
        (("--single-sizes", "9000"), ("single size `9000` lies outside [1, 256]",)),
        (("--ranges", "0-64,65-256"), ("range `(0, 64)`",)),
        (("--ranges", "1-64,100-256"), ("gap or overlap at `65`",)),
        (("--ranges", "1-64"), ("ranges end at `64`",)),
        (("--ranges", "1:64"), ("ranges `1:64` are not pairs",)),
        (("--max-num-batched-tokens", "0"), ("`--max-num-batched-tokens` is `0`",)),
        (("--compilation-config", '{"mode": 3'), ("`--compilation-config` is not JSON",)),
        (("--compilation-config", "[3]"), ("holds a list, not an object",)),
        (("--compilation-config", '{"mod": 3}'), ("option `mod` is unknown", "did you mean `mode`?")),
        (("--compilation-config", '{"strict": "yes"}'), ("`strict` is `'yes'`", "give true or false")),
        (("-cc.single_sizes=4,x",), ("`-cc.single_sizes` is `4,x`",)),
        (("-cc.single_sizes=true",), ("`-cc.single_sizes` is `True`",)),
        (("-cc.splitting_ops=a,b",), ("`-cc.splitting_ops` holds `a`", "`namespace::name`")),
        (("-cc.splitting_ops=vllm.attention",), ("`-cc.splitting_ops` holds", "write it as `vllm::attention`")),
        (("-cc.compile_sizes=0",), ("`-cc.compile_sizes` is `(0,)`",)),
        (("-cc.backend=tvm",), ("compiler `tvm` is unknown (given as `-cc.backend`)",)),
        (("-cc", '{"mode": 7}'), ("mode `7` is unknown", "0 to 3")),
        (("-cc", '{"spliting_ops": []}'), ("option `spliting_ops` is unknown", "did you mean `splitting_ops`?")),
        (("--ranges", "8-1"), ("range `(8, 1)` is not an interval",)),
        (("--ranges", "1-64,32-256"), ("gap or overlap at `32`",)),
        (("-cc.compile_budget_s=NaN",), ("`-cc.compile_budget_s` is `nan`",)),
        (("-cc.frobnicate=1",), ("option `frobnicate` is unknown", "known are mode")),
        (("-cc.mode",), ("`-cc.mode=` has no value",)),
        (("--enforce-eager", "--mode", "piecewise"), ("contradict each other",)),
        (("--split-ops", "a::b", "--split-ops-only", "a::b"), ("are both given",)),
        (("--dtype", "float33"), ("`float33` is no dtype",)),
        (("--device", "tpu"), ("`tpu` is no device",)),
        (("--device", "auto"), ("spreads a model over several devices",)),
        (("--trust", "everyone"), ("trust `everyone` is unknown",)),
        (("--promt", "x"), ("--promt", "did you mean --prompt?")),
        (("--frobnicate",), ("--frobnicate", "`--help` after the command shows what it takes")),
        (("--max-tokens", "none"), ("max-tokens",)),
        (("--max-tokens", "0"), ("`--max-tokens` is `0`",)),
        (("--prompt-ids", "1,two"), ("`--prompt-ids` is `1,two`",)),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value, tuple) and value[0].startswith("-") else "",
)
def test_an_option_that_cannot_be_used(
    model: Path, tmp_path: Path, flags: tuple[str, ...], said: tuple[str, ...]
) -> None:
    given = [flag for flag in EAGER if "--max-num-batched-tokens" not in flags or flag not in EAGER[2:]]
    given = [flag for flag in given if "--compiler" not in flags or flag not in EAGER[:2]]
    prompt = () if "--prompt-ids" in flags else ("--prompt-ids", "5,6")
    done = piecework("generate", model, *prompt, "--store", tmp_path / "store", *given, *flags)
    assert_told(done, 2, *said)


def test_no_prompt_an_empty_one_and_one_too_long(model: Path, store: Path) -> None:
    assert_told(piecework("generate", model, "--store", store), 2, "there is no prompt")
    assert_told(piecework("generate", model, "--store", store, "--prompt", "", *EAGER), 2, "prompt")
    long = ",".join(["7"] * 300)
    assert_told(piecework("generate", model, "--store", store, "--prompt-ids", long, *EAGER), 2, "256")
    assert_told(piecework("generate", model, "--store", store, "--prompt-ids", "5,9999", *EAGER), 2, "9999")


def test_unknown_commands_and_missing_arguments() -> None:
    assert_told(piecework("generat"), 2, 'Unknown command "generat"', 'did you mean "generate"?')
    assert_told(piecework("generate"), 2, "MODEL")
    assert_told(piecework("store", "shwo"), 2, 'did you mean "show"?')


class BreakingConfig(LlamaConfig):
    model_type = "piecework_breaking"


class BreakingModel(LlamaForCausalLM):
    config_class = BreakingConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        if found.logits.sum() > 0:
            found.logits = found.logits + 1
        return found


def test_a_graph_break(model: Path, tmp_path: Path) -> None:
    AutoConfig.register("piecework_breaking", BreakingConfig)
    AutoModelForCausalLM.register(BreakingConfig, BreakingModel)
    folder = tmp_path / "breaking"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "piecework_breaking", "architectures": ["BreakingModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "logits.sum() > 0:" in text)
    assert_told(generate(folder, tmp_path / "store"), 1, f"test_cli_errors.py:{line}")


@pytest.mark.parametrize("kind", ["a file in its place", "below a file"])
def test_a_store_that_takes_no_writes(model: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if kind == "a file in its place" else tmp_path / "file" / "store"
    assert_told(piecework("build", model, "--store", folder, *EAGER), 1, f"store `{folder}`", "--store DIR")


def test_a_damaged_entry_is_made_anew_and_under_strict_an_error(model: Path, store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    record = max((copy / "records/artifact").rglob("*.record"))
    for path in (record,):
        path.write_bytes(path.read_bytes()[:-20])
    strict = generate(model, copy, "--strict")
    assert_told(strict, 1, f"`{record}` is damaged")
    done = generate(model, copy)
    assert done.code == 0
    assert f"store: `{record}`" in done.err
    assert generate(model, copy, "--strict").code == 0


def test_modes_that_build_nothing(model: Path, tmp_path: Path) -> None:
    assert_told(piecework("build", model, "-O0", "--store", tmp_path), 2, "mode `none` has nothing to build")


def test_debug_adds_the_traceback_and_json_the_error(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    done = piecework("build", missing, "--store", tmp_path, "--debug")
    assert done.code == 1 and "Traceback" in done.err and "ModelError" in done.err
    told = piecework("build", missing, "--store", tmp_path, "--json")
    assert told.document["error"]["class"] == "ModelError"
    assert told.document["error"]["facts"] == {"folder": str(missing)}
    assert told.document["exit_code"] == told.code == 1
    assert piecework("build", missing, "--nonsense", "--json").document["error"]["class"] == "OptionError"


def test_a_variable_that_is_neither_true_nor_false(model: Path) -> None:
    done = piecework_process("store", "ls", PIECEWORK_STRICT="perhaps")
    assert_told(done, 2, "variable `PIECEWORK_STRICT=perhaps` is neither true nor false")


def test_torch_is_not_needed_to_be_told() -> None:
    assert torch.__version__  # the errors above were raised in this process; this one has no torch
    done = piecework_process("generate", "MODEL", "--ranges", "x", "--prompt-ids", "1")
    assert_told(done, 2, "ranges `x` are not pairs")


def test_check_names_the_step_that_would_fail(damaged: Any, model: Path, store: Path, tmp_path: Path) -> None:
    done = piecework("check", model, "--store", store, "--json", *EAGER)
    assert (done.code, done.document["works"]) == (0, True)
    assert {each["what"]: each["state"] for each in done.document["findings"]} == dict.fromkeys(
        ("configuration", "tokenizer", "program", "artifacts", "operators", "weights", "contracts"), "works"
    )
    before = piecework("check", model, "--store", tmp_path / "empty", *EAGER)
    assert "--  program: traces, and is not stored" in before.out
    assert not (tmp_path / "empty").exists()
    folder = damaged("model.safetensors", lambda data: data)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{")
    broken = piecework("check", folder, "--store", store, *EAGER)
    assert broken.code == 1
    assert "NO  tokenizer:" in broken.out and "NO  weights:" in broken.out
    assert "`model.norm.weight`" in broken.out
    (folder / "config.json").write_text("{")
    assert piecework("check", folder, "--store", store, *EAGER).out.startswith("NO  configuration: `config.json`")
