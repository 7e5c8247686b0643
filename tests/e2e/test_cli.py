"""The commands about a model, on a tiny random Llama: cold and warm, as text and as JSON."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from e2e.command import Done, llama_folder, piecework, piecework_process
from piecework.api.folder import open_model
from piecework.engine.generate import allocate_caches
from piecework.ops import Step, step_context
from piecework.options import CompileOptions
from piecework.stages.record import read_constants
from piecework.store.disk import DiskStore

PROMPT = "w5 w17 w40"
COMPILE = ("--compiler", "eager", "--max-num-batched-tokens", "256")
GREP = re.compile(r"Dynamo|torch.compile took|cache directory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / "store"


@pytest.fixture(scope="module")
def cold(model: Path, store: Path) -> Done:
    return generate(model, store, "--json")


def generate(model: Path, store: Path | str, *more: str) -> Done:
    return piecework("generate", model, "--prompt", PROMPT, "--max-tokens", "6", "--store", store, *COMPILE, *more)


def test_a_cold_start_answers_as_transformers_does(cold: Done, model: Path) -> None:
    found = cold.document
    theirs = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor([[5, 17, 40]]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert cold.code == 0
    assert found["token_ids"] == wanted
    assert found["text"] == "".join(f"w{token}" for token in wanted)
    assert found["prompt_ids"] == [5, 17, 40]


def test_a_cold_start_says_what_it_did(cold: Done, store: Path) -> None:
    found = cold.document
    assert (found["regions"], found["opaque"], found["sites"], found["distinct"]) == (7, 3, 4, 3)
    assert found["ranges"] == [[1, 1], [2, 64], [65, 256]]
    assert found["split_ops"] == ["piecework::attention", "piecework::kv_update"]
    assert (found["compiled"], found["loaded"], found["artifacts"]) == (9, 9, 9)
    assert found["bytes"] > 0
    assert [miss["reason"] for miss in found["misses"]] == ["nothing is stored under these factors"]
    timed = ("trace_s", "split_s", "compile_s", "load_s", "bind_s", "first_token_s", "tokens_per_s")
    assert all(found["timings"][name] > 0 for name in timed)
    lines = [line for line in cold.err.splitlines() if GREP.search(line)]
    assert [re.sub(r"\d+\.\d+", "N", line) for line in lines] == [
        f"INFO Using cache directory: {store}",
        "INFO Dynamo bytecode transform time: N s",
        "INFO torch.compile took N s in total",
    ]
    assert re.search(r"Compiling a graph for compile range \(2, 64\) takes \d+\.\d+ s", cold.err)


def test_a_cold_start_leaves_its_graph_beside_the_record(cold: Done, store: Path) -> None:
    said = re.search(r"the split graph is at (.*)", cold.err)
    assert said is not None
    (path,) = store.rglob("computation_graph.py")
    assert Path(said[1]) == path
    tree = ast.parse(path.read_text())
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "computation_graph")
    calls = [n for n in ast.walk(main) if isinstance(n, ast.Call)]
    assert len(calls) == cold.document["regions"]


def test_a_warm_start_compiles_nothing_and_is_quiet(cold: Done, model: Path, store: Path) -> None:
    warm = generate(model, store, "--json")
    found = warm.document
    assert found["token_ids"] == cold.document["token_ids"]
    assert (found["compiled"], found["loaded"], found["misses"]) == (0, 9, [])
    assert found["timings"]["trace_s"] == found["timings"]["compile_s"] == 0
    assert not GREP.search(warm.err)
    assert "compiled 0, loaded 9 artifacts" in generate(model, store).err


def test_text_goes_to_standard_output_alone(cold: Done, model: Path, store: Path) -> None:
    done = generate(model, store, "--prompt", "w9 w9")
    first, second = done.out.splitlines()
    assert first == cold.document["text"]
    assert re.fullmatch(r"(w\d+)+", second)


def test_prompts_as_ids(cold: Done, model: Path, store: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "tokenizer.json").unlink()
    done = piecework("generate", bare, "--prompt-ids", "5,17,40", "--max-tokens", "6", "--store", store, *COMPILE)
    assert done.out.strip() == ",".join(map(str, cold.document["token_ids"]))
    told = generate(bare, store)
    assert (told.code, told.out) == (1, "")
    assert "`tokenizer.json`" in told.err and "--prompt-ids 1,2,3" in told.err


def test_eager_gives_the_same_tokens(cold: Done, model: Path) -> None:
    for flags in (("--enforce-eager",), ("-O0",), ("-cc.mode=0",), ("--compilation-config", '{"mode": "none"}')):
        given = ("generate", model, "--prompt", PROMPT, "--max-tokens", "6", "--store", "memory", "--json")
        done = piecework(*given, *flags)
        assert done.document["token_ids"] == cold.document["token_ids"], flags
        assert (done.document["mode"], done.document["compiled"]) == ("none", 0)


def test_build_needs_no_weights_and_runs_nothing(cold: Done, model: Path, tmp_path: Path) -> None:
    bare, store = tmp_path / "bare", tmp_path / "store"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    built = piecework("build", bare, "--store", store, "--json", *COMPILE)
    found = built.document
    assert (built.code, found["compiled"], found["loaded"], found["fall_backs"]) == (0, 9, 0, [])
    assert found["bytes"] == cold.document["bytes"]
    warm = generate(model, store, "--json").document
    assert (warm["compiled"], warm["token_ids"]) == (0, cold.document["token_ids"])
    again = piecework("build", bare, "--store", store, *COMPILE)
    assert again.out.strip() == found["key"]
    assert "compiled 0" in again.err


def test_explain_before_and_after(cold: Done, model: Path, store: Path, tmp_path: Path) -> None:
    before = piecework("explain", model, "--json", "--store", tmp_path / "empty", *COMPILE).document
    after = piecework("explain", model, "--json", "--store", store, *COMPILE).document
    for name in ("regions", "opaque", "sites", "distinct", "ranges", "artifacts", "split_ops", "cuts"):
        assert before[name] == after[name], name
    assert (before["is_stored"], len(before["missing_artifacts"]), len(before["misses"])) == (False, 9, 1)
    assert (after["is_stored"], after["missing_artifacts"], after["misses"]) == (True, [], [])
    assert not (tmp_path / "empty").exists()
    assert after["declared_by"]["piecework::attention"] == "piecework.ops.attention"
    keys = [{box: artifact["key"] for box, artifact in piece["artifacts"].items()} for piece in before["pieces"]]
    assert keys == [{b: a["key"] for b, a in piece["artifacts"].items()} for piece in after["pieces"]]
    assert [piece["sites"] for piece in after["pieces"]] == [1, 2, 1]
    text = piecework("explain", model, "--store", store, *COMPILE).out
    assert "7: 3 opaque, 4 sites of 3 distinct pieces" in text
    assert "piecework::attention (declared in piecework.ops.attention)" in text


def test_explain_tells_what_the_trace_took_for_granted(model: Path, store: Path, cold: Done) -> None:
    found = piecework("explain", model, "--guards", "--json", "--store", store, *COMPILE).document
    assert any("variance_epsilon" in fact["what"] or "1e-06" in fact["value"] for fact in found["facts"])
    assert any(function.endswith("LlamaMLP.forward") for function in found["functions"])
    assert "Python values that the trace took for constant" in piecework(
        "explain", model, "--guards", "--store", store, *COMPILE
    ).out


def test_dump_and_an_edited_piece(cold: Done, model: Path, store: Path, tmp_path: Path) -> None:
    done = piecework("dump", model, tmp_path / "dump", "--store", store, "--json", *COMPILE)
    assert (done.code, done.document["compiled"]) == (0, 0)
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["1_passes", "1_traced.txt", "2_split.txt", "3_pieces", "4_plan.json", "5_artifacts"]
    assert len(json.loads((tmp_path / "dump/4_plan.json").read_text())["regions"]) == 7
    assert "torch.ops.piecework.attention" in (tmp_path / "dump/2_split.txt").read_text()
    edited = tmp_path / "dump/3_pieces/piece_1.py"
    text = edited.read_text()
    assert text.count("torch.ops.piecework.silu_and_mul") == 1
    # Edited pieces that say the same: the same artifacts and answer, under a record of their own.
    same = generate(model, store, "--json", "--override", str(tmp_path / "dump")).document
    assert (same["compiled"], same["token_ids"]) == (0, cold.document["token_ids"])
    edited.write_text(text.replace("torch.ops.piecework.silu_and_mul", "operator.mul"))
    other = generate(model, store, "--json", "--override", str(tmp_path / "dump")).document
    assert (other["compiled"], other["reused"]) == (3, 6)
    assert other["token_ids"] != cold.document["token_ids"]
    assert generate(model, store, "--json").document["token_ids"] == cold.document["token_ids"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("v0 = ", "v0 = 1 + ", "the edited piece `0` is not read: piece text has a statement"),
        ("int64[", "int32[", "the edited piece `0` takes or returns something else than before"),
        ("    return (", "    return (v0, ", "the edited piece `0` takes or returns something else than before"),
    ],
)
def test_an_edited_piece_that_does_not_fit(
    cold: Done, model: Path, store: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = piecework("explain", model, "--json", "--store", store, *COMPILE).document["pieces"][0]["digest"]
    blob = next(store.rglob(text)).read_text()
    (tmp_path / "piece_0.py").write_text(blob.replace(old, new, 1))
    done = piecework("build", model, "--store", tmp_path / "s", "--override", tmp_path, *COMPILE)
    assert (done.code, done.out) == (2, "")
    assert said in done.err and "hint:" in done.err


def test_the_store_memory_and_the_variable(cold: Done, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    kept = piecework_process("build", model, "--json", *COMPILE, PIECEWORK_STORE=str(folder))
    assert (kept.code, kept.document["store"], kept.document["compiled"]) == (0, str(folder), 9)
    gone = piecework_process("build", model, "--json", "--store", "memory", *COMPILE, PIECEWORK_STORE=str(folder))
    assert (gone.document["store"], gone.document["compiled"]) == ("memory", 9)


def test_a_read_only_store_serves_and_gets_nothing(cold: Done, model: Path, store: Path, tmp_path: Path) -> None:
    warm = generate(model, store, "--json", "--store-read-only")
    assert warm.document["compiled"] == 0
    empty = tmp_path / "empty"
    assert generate(model, empty, "--json", "--store-read-only").document["compiled"] == 9
    assert not empty.exists()
    both = generate(model, store, "--store-read-only", "--store-write-only")
    assert both.code == 2 and "contradict each other" in both.err


def test_the_graph_beside_the_record_gives_what_the_program_gives(cold: Done, model: Path, store: Path) -> None:
    options = CompileOptions(compiler="eager", max_num_batched_tokens=256)
    opened = open_model(model, options=options, store=DiskStore(store))
    assert opened.record is not None
    (path,) = store.rglob(f"{opened.program.key}/computation_graph.py")
    space: dict[str, Any] = {}
    exec(path.read_text(), space)
    given = {
        "input_ids": torch.tensor([[5, 17, 40, 9]]),
        "position_ids": torch.arange(4)[None],
        "logits_to_keep": torch.tensor([1, 3]),
        "tokens": 4,
        "rows": 2,
    }
    values = {value: given[b["name"]] for value, b in opened.record.values.items() if b["kind"] in ("symbol", "input")}
    constants = read_constants(DiskStore(store).read_blob(opened.record.constants), "cpu")

    def attend(call: Callable[[], Any]) -> Any:
        caches = allocate_caches(opened.sites, num_pages=2, page_size=4, dtype=opened.dtype)
        step = Step.from_lists(
            slots=[4, 5, 6, 7], query_starts=[0, 4], sequence_lengths=[4], page_table=[[1]], sites=caches
        )
        with torch.no_grad(), step_context(step):
            return call()

    weights = {**constants, **opened.program.weights}
    got = attend(lambda: space["computation_graph"](**values, weights=weights))
    wanted = attend(lambda: opened.step(given["input_ids"], given["position_ids"], given["logits_to_keep"]))
    assert torch.equal(got, wanted)
