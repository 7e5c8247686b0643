"""A model of one's own inside an engine of one's own: declare, compile, call, and load without the model.

    python examples/own_model.py [--compiler inductor]

The operator finds what belongs to this step in a context of the engine, by the name of its own site: nothing of the
step is traced, guarded or part of a key.
"""

from __future__ import annotations

import argparse
import contextvars
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import piecework as pw
from piecework.events import ArtifactCompiled, ArtifactLoaded, Recorder, SplitDone

library = torch.library.Library("own", "DEF")
library.define("attention(Tensor query, Tensor key, Tensor value, str site) -> Tensor")


@dataclass
class Step:
    """What one step knows: the keys and values that each site has seen so far."""

    caches: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


current_step: contextvars.ContextVar[Step] = contextvars.ContextVar("current_step")


@pw.split_op("own::attention")
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, site: str) -> torch.Tensor:
    """Append keys and values to the site's cache, and attend over all of it.

    Tensors:
        query, key, value  [H, T, D]  model
        ->                 [H, T, D]  model
    """
    caches = current_step.get().caches
    if site in caches:
        key, value = (torch.cat([old, new], dim=1) for old, new in zip(caches[site], (key, value), strict=True))
    caches[site] = (key, value)
    rows, columns = query.shape[1], key.shape[1]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


library.impl("attention", attention, "CompositeExplicitAutograd")


@torch.library.register_fake("own::attention", lib=library)
def _attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, site: str) -> torch.Tensor:
    return torch.empty_like(query)


class Layer(nn.Module):
    """One decoder layer; its attention is called by the layer's name."""

    def __init__(self, width: int, heads: int, index: int) -> None:
        super().__init__()
        self.heads, self.site = heads, f"layers.{index}.attention"
        self.norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.query_key_value(self.norm(hidden)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(0, 1).contiguous() for part in rows]
        mixed = torch.ops.own.attention(*heads, self.site)
        hidden = hidden + self.output(mixed.transpose(0, 1).flatten(1))
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden))))


@pw.compilable(dynamic={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}})
class MyModel(nn.Module):
    """Map tokens at their positions to logits."""

    def __init__(self, layers: int = 4, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, 4, index) for index in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids) + self.place(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def generate(call: object, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt greedily, with the caches of one step object; a prompt of any length is one call."""
    token = current_step.set(Step())
    try:
        ids, done = list(prompt), 0
        while len(ids) < len(prompt) + count:
            positions = torch.arange(done, len(ids))
            logits = call(torch.tensor(ids[done:]), positions)  # type: ignore[operator]
            done = len(ids)
            ids.append(int(logits[-1].argmax()))
        return ids[len(prompt) :]
    finally:
        current_step.reset(token)


def main() -> None:
    """Compile the model, generate with it, then load the program by its key with the weights alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="inductor")
    compiler = parser.parse_args().compiler
    torch.manual_seed(0)
    model = MyModel().eval()
    example = {"input_ids": torch.arange(7), "positions": torch.arange(7)}
    options = pw.CompileOptions(compiler=compiler, max_num_batched_tokens=128)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        seen = Recorder()
        store = pw.DiskStore(folder)
        program = pw.compile(model, example, options=options, store=store, observer=seen)
        split = seen.of(SplitDone)[-1]  # one token is a program of its own: strides decide otherwise there
        print(f"{split.regions} regions, {split.sites} sites, {split.distinct} distinct pieces")
        print(f"compiled {len(seen.of(ArtifactCompiled))} artifacts")
        answers = [generate(call, [1, 2, 3, 4, 5], 12) for call in (model, program)]
        print(f"the model gives   {answers[0]}")
        print(f"the program gives {answers[1]}")
        assert answers[0] == answers[1]

        weights: Mapping[str, torch.Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        key = program.key
        del model, program
        again = Recorder()
        with pw.no_compile():
            loaded = pw.load(store, key=key, weights=weights, observer=again)
        print(f"loaded {len(again.of(ArtifactLoaded))} artifacts by key, compiled {len(again.of(ArtifactCompiled))}")
        assert generate(loaded, [1, 2, 3, 4, 5], 12) == answers[0]


if __name__ == "__main__":
    main()
