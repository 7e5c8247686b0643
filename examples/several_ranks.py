"""One model, two processes: each holds half of it, both start from one program, and both give the same text.

    torchrun --nproc-per-node=2 examples/several_ranks.py MODEL [STORE]

The first start compiles on one rank; the second compiles nothing, on none.
"""

from __future__ import annotations

import sys

import piecework as pw
from piecework.events import ArtifactCompiled, Recorder
from piecework.parallel.events import RanksAgreed

model = sys.argv[1]
store = pw.DiskStore(sys.argv[2]) if len(sys.argv) > 2 else pw.MemoryStore()
options = pw.CompileOptions(tensor_parallel_size=2, compiler="eager", ranges=((1, 64),), max_num_batched_tokens=64)

seen = Recorder()
llm = pw.LLM(model, options=options, store=store, observer=seen)
ranks = llm.model.ranks
assert ranks is not None
(agreed,) = seen.of(RanksAgreed)
where = "was in the store of" if agreed.is_hit else "was built on"
print(f"rank {ranks.rank}: the program {where} rank {agreed.owner}; compiled {len(seen.of(ArtifactCompiled))} here")
(answer,) = llm.generate([[3, 4, 5, 6]], max_tokens=8, ignore_eos=True)
print(f"rank {ranks.rank}: {answer.token_ids}")
# Together, with parameters: rank 0 schedules and samples, and every rank gets its answers, here of a temperature of 1.
sampled = llm.generate([[3, 4, 5, 6], [7, 8]], pw.SamplingParameters(max_tokens=8, ignore_eos=True, temperature=1.0))
print(f"rank {ranks.rank}: {[list(one.token_ids) for one in sampled]}")
ranks.leave()
