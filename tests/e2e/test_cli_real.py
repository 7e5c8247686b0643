"""The command line on a real small model with Inductor: tokens of Transformers, then a start without a compiler."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from scripts.real_model import real_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from e2e.command import piecework_process

PROMPTS = ("The capital of France is", "In the beginning")
FLAGS = ("--max-num-batched-tokens", "64")
MAX_TOKENS = 16
MARGIN = 1e-3  # of two logits whose order rounding may not turn


@pytest.mark.slow
def test_a_real_model_cold_and_warm(tmp_path: Path) -> None:
    folder, store = real_model(), tmp_path / "store"
    built = piecework_process("build", folder, "--store", store, "--json", *FLAGS)
    assert built.code == 0, built.err
    found = built.document
    assert (found["regions"], found["opaque"], found["sites"], found["distinct"]) == (61, 30, 31, 3)
    assert (found["compiled"], found["fall_backs"]) == (6, [])
    assert len(re.findall(r"Dynamo|torch.compile took|cache directory", built.err)) == 3
    (graph,) = store.rglob("computation_graph.py")
    main = next(n for n in ast.parse(graph.read_text()).body if getattr(n, "name", "") == "computation_graph")
    assert sum(isinstance(node, ast.Call) for node in ast.walk(main)) == 61

    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    given = ("generate", folder, "--store", store, "--store-read-only", "--json", "--max-tokens", str(MAX_TOKENS))
    warm = piecework_process(*given, *prompts, *FLAGS, PATH="/nowhere", CXX="")
    assert warm.code == 0, warm.err
    assert (warm.document["compiled"], warm.document["misses"]) == (0, [])

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, answer in zip(PROMPTS, warm.document["completions"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            theirs = model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0)
        wanted = theirs[0, ids["input_ids"].shape[1] :].tolist()
        sure = next((n for n, margin in enumerate(answer["margins"]) if margin < MARGIN), len(answer["margins"]))
        assert sure > MAX_TOKENS // 2
        assert answer["token_ids"][:sure] == wanted[:sure]
