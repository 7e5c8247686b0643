"""A state-space model down the line: its recurrence is one opaque operator a layer, its state in the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import piecework as pw
from piecework.api.serving import open_engine
from piecework.errors import ModelError, StepError
from piecework.events import ArtifactCompiled, FallBack, Recorder, SplitDone
from piecework.models.hugging_face import load_model
from piecework.models.mixers import behaves_alike, looks_like_mixer
from piecework.ops import Step, allocate_states, step_context
from piecework.values.tolerance import decisive_margin

VOCABULARY, LAYERS = 96, 3
PROMPT = list(range(5, 25))
OPTIONS = pw.CompileOptions(compiler="eager", max_num_batched_tokens=16, ranges=((1, 16),))


def tiny(folder: Path | None = None, **changed: Any) -> Any:
    """Make a random Mamba-2 of three layers, and write it where a folder is named."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "state_size": 16, "conv_kernel": 4, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **{**values, **changed})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "embed" in name else 0.25))
            elif "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def test_it_is_cut_at_its_layers_and_generates_transformers_own_tokens(tmp_path: Path) -> None:
    """The prompt goes in two chunks, so that the second starts from the state that the first left."""
    reference = tiny(tmp_path)
    exact_model = tiny().double()
    store, cold, warm = pw.MemoryStore(), Recorder(), Recorder()
    model = pw.LLM(tmp_path, options=OPTIONS, store=store, observer=cold)
    (split,) = cold.of(SplitDone)
    assert (split.regions, split.opaque, split.distinct) == (2 * LAYERS + 1, LAYERS, 3)
    assert cold.of(FallBack) == []
    (answer,) = model.generate(PROMPT, max_tokens=24, ignore_eos=True)
    ids, eager_error, decided = list(PROMPT), 0.0, 0
    for token in answer.generation.tokens:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            right = exact_model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        eager_error = max(eager_error, float((logits - right).norm() / right.norm()))
        if token.margin <= decisive_margin(float(right.norm()), "float32", eager_error):
            break
        assert token.token_id == int(logits.argmax())
        ids.append(token.token_id)
        decided += 1
    assert decided == 24

    again = pw.LLM(tmp_path, options=OPTIONS, store=store, observer=warm)
    assert warm.of(ArtifactCompiled) == []
    assert again.generate(PROMPT, max_tokens=24, ignore_eos=True)[0].token_ids == answer.token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_of_two_sequences_give_transformers_own_logits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Chunks, decode and mixed steps, with padding; the slots of the states are in another order than the sequences."""
    reference, exact_model = tiny(tmp_path).to(dtype), tiny().double()
    loaded = load_model(tmp_path, dtype=dtype)
    states = allocate_states(loaded.sites, num_slots=3, dtype=dtype)  # type: ignore[arg-type]
    for state in states.values():  # what an earlier sequence left in a slot is not read
        state.inputs.fill_(7.0)
        state.heads.fill_(7.0)
    ids = [torch.randint(3, VOCABULARY, (length,)) for length in (90, 15)]
    slots = [2, 0]
    got: list[list[torch.Tensor]] = [[], []]
    steps = [[(0, 0, 70)], [(1, 0, 9), (0, 70, 71)], [(0, 71, 88), (1, 9, 13)], [(0, 88, 89), (1, 13, 14)]]
    steps += [[(1, 14, 15)], [(0, 89, 90)]]
    for parts in steps:
        tokens = torch.cat([ids[b][first:last] for b, first, last in parts] + [torch.zeros(2).long()])
        starts = [0]
        for _, first, last in parts:
            starts.append(starts[-1] + last - first)
        step = Step.from_lists(
            slots=range(starts[-1]), query_starts=starts, sequence_lengths=[last for _, _, last in parts],
            page_table=[[0] for _ in parts], sites=states, num_padded=len(tokens),
            state_slots=[slots[b] for b, _, _ in parts],
        )  # fmt: skip
        with torch.no_grad(), step_context(step):
            logits = loaded.model(tokens[None], torch.zeros_like(tokens)[None], torch.arange(starts[-1]))[0]
        for index, (b, _, _) in enumerate(parts):
            got[b].append(logits[starts[index] : starts[index + 1]])
    for b in range(2):
        with torch.no_grad():
            own = reference(input_ids=ids[b][None], use_cache=False).logits[0]
            exact = exact_model(input_ids=ids[b][None], use_cache=False).logits[0]
        off = (own.double() - exact).norm() / exact.norm()
        error = (torch.cat(got[b]).double() - exact).norm() / exact.norm()
        assert error <= max(2 * off, 4 * torch.finfo(dtype).eps)


def test_a_mixer_is_known_by_what_it_computes() -> None:
    model = tiny()
    mixers = [module for module in model.modules() if looks_like_mixer(module)]
    assert len(mixers) == LAYERS and behaves_alike(mixers[0])

    class Other(type(mixers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
            return super().forward(hidden_states, **more) * 1.01

    other = Other(model.config, 0)
    assert looks_like_mixer(other) and not behaves_alike(other)
    other.scale = torch.nn.Parameter(torch.ones(1))
    assert not looks_like_mixer(other)


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ModelError, match=r"a recurrent state at `layers\.0\.state`, which the engine does not"):
        open_engine(tmp_path)
    loaded = load_model(tmp_path)
    step = Step.from_lists(
        slots=[0], query_starts=[0, 1], sequence_lengths=[1], page_table=[[0]], sites={"layers.0.state": torch.ones(1)}
    )
    with pytest.raises(StepError, match=r"state is a `Tensor` and no `RecurrentState`"), step_context(step):
        loaded.model(torch.ones(1, 1).long(), torch.zeros(1, 1).long())
