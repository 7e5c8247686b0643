"""The straight line on a GPU: compiled equals eager, and a fresh process loads without any compiler, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu.toy import ToyLlama, example

import piecework as pw
from piecework.events import ArtifactCompiled, FallBack, Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DYNAMIC = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
OPTIONS = pw.CompileOptions(max_num_batched_tokens=512, ranges=((1, 64), (65, 512)))
SIZES = (1, 2, 7, 64, 65, 300, 512)

LOAD = """
import json, os, sys
spawned = []
sys.addaudithook(lambda event, args: spawned.append(str(args)[:100]) if event == "subprocess.Popen" else None)
os.environ["PATH"] = ""
import torch
import piecework as pw
from tests.gpu.toy import example
import tests.gpu.toy
store, key, folder = sys.argv[1:4]
weights = torch.load(f"{folder}/weights.pt", map_location="cuda")
program = pw.load(pw.DiskStore(store, read_only=True), key=key, weights=weights)
outputs = {n: program(*example(n, "cuda")).cpu() for n in json.loads(sys.argv[4])}
torch.save(outputs, f"{folder}/second.pt")
names = ("torch._inductor", "torch._dynamo", "triton", "sympy", "torch._inductor.config")
print(json.dumps({"imported": [n for n in names if n in sys.modules], "spawned": spawned}))
"""


def test_compiled_equals_eager_and_loads_without_a_compiler(tmp_path: Path) -> None:
    model = ToyLlama(layers=4, hidden=256).cuda().to(torch.bfloat16).eval().requires_grad_(False)
    store = pw.DiskStore(tmp_path / "store")
    seen = Recorder()
    program = pw.compile(model, example(16, "cuda"), dynamic=DYNAMIC, options=OPTIONS, store=store, observer=seen)
    assert [event.reason for event in seen.of(FallBack)] == []
    assert len(seen.of(ArtifactCompiled)) == 9
    exact = ToyLlama(layers=4, hidden=256).cuda().eval().requires_grad_(False)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    outputs = {}
    for size in SIZES:
        inputs = example(size, "cuda")
        outputs[size] = program(*inputs).cpu()
        with torch.no_grad():
            want, eager = exact(*inputs).cpu(), model(*inputs).float().cpu()
        allowed = max(2 * float((eager - want).norm() / want.norm()), 4 * 2**-8)
        assert float((outputs[size].float() - want).norm() / want.norm()) <= allowed, size
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    command = [sys.executable, "-c", LOAD, str(tmp_path / "store"), program.key, str(tmp_path), json.dumps(SIZES)]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}/src:{root}", "HOME": str(tmp_path)}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said == {"imported": [], "spawned": []}
    second = torch.load(tmp_path / "second.pt")
    for size in SIZES:
        assert torch.equal(second[size], outputs[size]), size
