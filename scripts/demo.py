"""The main job on a real model: compile it piece by piece, generate, compare with Transformers, start again warm.

    python scripts/demo.py [--store DIR] [--tokens 64]

Prints what was traced, cut, compiled and loaded, what it cost, and whether every token is the one that Transformers'
own `generate` gives. The second run compiles nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import piecework as pw
from piecework.api.stores import default_store, report_to_log
from piecework.cli.output import start_logging
from piecework.events import ArtifactCompiled, ArtifactLoaded, Phase, Recorder, fan_out
from piecework.values.tolerance import decisive_margin
from real_model import real_model

SENTENCE = "The history of bread begins with wild grain, a flat stone and a fire, and it is longer than writing. "
LENGTHS = (1, 2, 5, 16, 63, 64, 130, 300)

WARM = """
import sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
import piecework as pw
from piecework.events import ArtifactCompiled, Recorder
seen = Recorder()
store = pw.DiskStore(sys.argv[2], read_only=True)
opened = time.perf_counter()
model = pw.LLM(sys.argv[1], dtype="float32", store=store, observer=seen)
bound = time.perf_counter()
model.generate([[1, 2, 3]], max_tokens=1)
done = time.perf_counter()
names = ("transformers", "torch._dynamo", "torch._inductor.config", "sympy")
print(f"  import torch          {imported - began:8.2f} s")
print(f"  warm start            {bound - opened:8.2f} s   from opening the store to a bound program, weights read")
print(f"  first token           {done - began:8.2f} s   from process start")
imported = [name for name in names if name in sys.modules] or "nothing"
print(f"  compiled {len(seen.of(ArtifactCompiled))}; imported of compiler and model library: {imported}")
"""


def main() -> int:
    """Run the demo; return the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="", help="folder of the store (default: the platform's cache folder)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    options = parser.parse_args()
    folder = real_model()
    sys.stdout.reconfigure(line_buffering=True)  # lines as they come, also into a pipe
    print(f"model: {folder}")
    start_logging()  # each artifact is a line as it is made: a cold start is minutes long
    seen = Recorder()
    watch = fan_out(seen, report_to_log)
    store = pw.DiskStore(options.store, observer=watch) if options.store else default_store(watch)
    began = time.perf_counter()
    model = pw.LLM(folder, dtype="float32", store=store, observer=watch)
    report_start(model, seen, time.perf_counter() - began)
    prompts = make_prompts(model)
    print(f"{len(prompts)} prompts, {options.tokens} tokens each: compiled, eager (2 of them), and by Transformers")
    compiled = model.generate(prompts, max_tokens=options.tokens, ignore_eos=True)
    print(f"  compiled: {speed(compiled):.1f} tokens/s")
    eager = pw.LLM(folder, dtype="float32", options=pw.CompileOptions(mode="none"))
    print(f"  eager:    {speed(eager.generate(prompts[:2], max_tokens=options.tokens, ignore_eos=True)):.1f} tokens/s")
    print(f"text: {compiled[3].text.strip()[:100]!r} …")
    differing = compare(folder, prompts, compiled, options.tokens)
    print("start again, in a fresh process:", flush=True)
    subprocess.run([sys.executable, "-c", WARM, str(folder), str(store.path)], check=True)
    return 1 if differing else 0


def report_start(model: pw.LLM, seen: Recorder, elapsed_s: float) -> None:
    """Print what the start did and what it cost."""
    phases: dict[str, float] = {}
    for phase in seen.of(Phase):
        phases[phase.name] = phases.get(phase.name, 0.0) + phase.elapsed_s
    record = model.model.record
    assert record is not None
    kinds = [region["kind"] for region in record.regions]
    opaque, sites = kinds.count("opaque"), kinds.count("piece")
    print(f"  regions {len(kinds)}, opaque {opaque}, sites {sites}, distinct pieces {len(record.pieces)}")
    made, loaded = seen.of(ArtifactCompiled), seen.of(ArtifactLoaded)
    print(
        f"  trace {phases.get('trace', 0.0):.2f} s, compile {phases.get('compile', 0.0):.2f} s, start {elapsed_s:.2f} s"
    )
    print(
        f"  compiled {len(made)}, loaded {len(loaded)} artifacts, {sum(event.size_bytes for event in loaded):,} bytes"
    )


def make_prompts(model: pw.LLM) -> list[list[int]]:
    """Return eight prompts of 1 to 300 tokens."""
    ids = model.encode(SENTENCE * 16)
    return [ids[index : index + length] for index, length in enumerate(LENGTHS)]


def speed(completions: list) -> float:
    """Return the tokens a second of all answers, first tokens left out."""
    tokens = [token for one in completions for token in one.generation.tokens[1:]]
    return len(tokens) / sum(token.elapsed_s for token in tokens)


def compare(folder: Path, prompts: list[list[int]], ours: list, count: int) -> int:
    """Compare with Transformers' own greedy `generate`; return how many prompts differ where they must not.

    After a step whose lead is within the tolerance the texts may part, so a prompt is compared up to there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None  # as ours: go on to the token limit
    differing = equal = 0
    for prompt, answer in zip(prompts, ours, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        with torch.no_grad():
            out = theirs.generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=count, do_sample=False)
            norm = float(theirs(torch.tensor([prompt])).logits[0, -1].norm())
        wanted = out[0, len(prompt) :].tolist()
        step = next((i for i, (a, b) in enumerate(zip(wanted, answer.token_ids, strict=True)) if a != b), None)
        if step is None:
            equal += 1
            continue
        lead = answer.generation.margins[step]
        must_agree = lead > decisive_margin(norm, "float32")
        differing += must_agree
        verdict = "too much to differ" if must_agree else "within tolerance"
        print(f"  prompt of {len(prompt)} tokens parts at step {step}, where the lead is {lead:.2e}: {verdict}")
    print(f"  {equal} of {len(prompts)} prompts give Transformers' own {count} tokens; {differing} differ")
    return differing


if __name__ == "__main__":
    sys.exit(main())
