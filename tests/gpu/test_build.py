"""`piecework build` for a GPU: from a configuration alone, in little memory, with every choice of Triton's made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import OptionError
from piecework.seam.toolchain import toolchain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MOST_BYTES = 1_500_000_000
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = CONFIG | {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "vocab_size": 512,
}  # fmt: skip

# Builds in a process of its own, and samples what the device as a whole has free, from after its context on.
BUILD = """
import json, sys, threading, time
import torch
torch.ones(1, device="cuda")
torch.cuda.synchronize()
free = least = torch.cuda.mem_get_info()[0]
finished = threading.Event()
def sample():
    global least
    while not finished.is_set():
        least = min(least, torch.cuda.mem_get_info()[0])
        time.sleep(0.002)
thread = threading.Thread(target=sample, daemon=True)
thread.start()
import piecework as pw
from piecework.api.folder import build_folder
from piecework.events import FallBack, Recorder, Verified
seen = Recorder()
store = pw.DiskStore(sys.argv[2])
options = pw.CompileOptions(**json.loads(sys.argv[3]))
started = time.perf_counter()
built = build_folder(sys.argv[1], dtype="bfloat16", device="cuda", options=options, store=store, observer=seen)
seconds = time.perf_counter() - started
finished.set()
thread.join()
artifacts = [store.read_record("artifact", k) for p in built.record.pieces for k in p.artifacts.values()]
print(json.dumps({
    "key": built.key, "seconds": round(seconds, 1), "device_bytes": free - least,
    "reserved_bytes": torch.cuda.max_memory_reserved(), "fall_backs": [e.reason for e in seen.of(FallBack)],
    "verified": sorted({e.outcome for e in seen.of(Verified)}),
    "launches": [[name, l["config"]] for a in artifacts for name, l in a["facts"].get("launches", {}).items()],
}))
"""
# Binds what was built to weights in a fresh process in which nothing may compile and nothing be tuned.
START = """
import json, sys
import torch
import piecework as pw
from piecework.api.folder import open_model
from piecework.events import ArtifactCompiled, ArtifactLoaded, Recorder
seen = Recorder()
options = pw.CompileOptions(**json.loads(sys.argv[3]))
with pw.no_compile():
    opened = open_model(sys.argv[1], dtype="bfloat16", device="cuda", options=options,
                        store=pw.DiskStore(sys.argv[2], read_only=True), observer=seen)
print(json.dumps({"compiled": len(seen.of(ArtifactCompiled)), "loaded": len(seen.of(ArtifactLoaded)),
                  "imported": [n for n in ("torch._inductor", "triton", "torch._dynamo") if n in sys.modules]}))
"""


def model_folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def child(script: str, folder: Path, store: Path, **options: Any) -> dict[str, Any]:
    words = [sys.executable, "-c", script, str(folder), str(store), json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("autotune", [False, True])
def test_eight_billion_parameters_are_built_in_one_and_a_half_gigabytes(tmp_path: Path, autotune: bool) -> None:
    folder = model_folder(tmp_path / "model", CONFIG)
    found = child(BUILD, folder, tmp_path / "store", autotune=autotune, max_num_batched_tokens=8192)
    print({name: value for name, value in found.items() if name != "launches"})
    assert found["fall_backs"] == [] and found["verified"] == ["held"]
    assert found["reserved_bytes"] <= MOST_BYTES
    assert found["device_bytes"] <= MOST_BYTES
    assert found["launches"] and all(config for _, config in found["launches"])
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    print({"store_bytes": size_bytes})


def test_what_was_built_from_a_configuration_starts_warm_and_tunes_nothing(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(tmp_path / "model", TINY)
    found = child(BUILD, folder, tmp_path / "store", autotune=True, max_num_batched_tokens=256)
    assert found["fall_backs"] == []
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "config.json").write_text((folder / "config.json").read_text())
    started = child(START, tmp_path / "weights", tmp_path / "store", autotune=True, max_num_batched_tokens=256)
    assert started == {"compiled": 0, "loaded": started["loaded"], "imported": []}
    assert started["loaded"] >= 3


def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(OptionError, match="`cuda:99` is not here"):
        toolchain("cuda:99")


def test_the_number_of_a_device_is_no_factor() -> None:
    count = torch.cuda.device_count()
    of_architecture: dict[str, list[dict[str, str]]] = {}
    for number in range(count):
        found = toolchain(f"cuda:{number}")
        of_architecture.setdefault(found["arch"], []).append(found)
    assert all(each == alike[0] for alike in of_architecture.values() for each in alike)
