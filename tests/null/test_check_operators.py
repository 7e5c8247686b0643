"""`piecework check MODEL`: operators run in a step, on real inputs at several sizes, and are held to their contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

import case_operators  # noqa: F401  # registers `cases::put`
import piecework as pw
from piecework.diagnostics.check_model import check_model
from piecework.diagnostics.check_operators import check_operators, watch_steps
from piecework.diagnostics.findings import FAILS, WORKS
from piecework.options import CompileOptions
from piecework.seam.watch import ContractWatch
from tiny_models import tiny_folder

SPACE = "watched"
SIZES = (1, 2, 7, 8, 13, 16)


def bump_large(x: Tensor) -> Tensor:
    if len(x) % 8 == 0:
        x.add_(100)
    return x + 1


def same(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _into(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


BROKEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "bump_large": (bump_large, same, "writes its argument `x`, which its schema does not say"),
    "view": (lambda x: x.view(-1, 4) if len(x) % 2 else x * 1, same, "gives back its argument `x`, or a view of it"),
    "strided": (lambda x: (x * 3).t().contiguous().t(), same, "gives a result of strides"),
    "double": (lambda x: x.double(), same, "gives a result of dtype `float64`, where its fake says `float32`"),
    "padded": (lambda x: x * 3, lambda x: x.new_empty(len(x), 8), "gives a result of shape `[1, 4]`"),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library(SPACE, "FRAGMENT")
    for name, (body, fake, _) in BROKEN.items():
        made.define(f"{name}(Tensor x) -> Tensor")
        made.impl(name, body, "CPU")
        torch.library.register_fake(f"{SPACE}::{name}", fake, lib=made)
    made.define("into(Tensor x, Tensor(a!) out) -> ()")
    made.impl("into", _into, "CPU")
    torch.library.register_fake(f"{SPACE}::into", lambda x, out: None, lib=made)
    made.define("without(Tensor x) -> Tensor")
    made.impl("without", lambda x: x * 2, "CPU")
    yield made


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_body_is_found_on_the_run_s_own_inputs(name: str) -> None:
    watch = ContractWatch()
    operator = getattr(getattr(torch.ops, SPACE), name)
    with torch.inference_mode(), watch:
        for size in SIZES:
            operator(torch.rand(size, 4))
    messages = [fault.message for fault in watch.faults[f"{SPACE}::{name}"]]
    assert messages and messages[0].startswith(f"operator `{SPACE}::{name}` {BROKEN[name][2]}"), messages
    assert len(watch.shapes[f"{SPACE}::{name}"]) == len(SIZES)


def test_an_operator_without_a_fake_is_named() -> None:
    watch = ContractWatch()
    with torch.inference_mode(), watch:
        torch.ops.watched.without(torch.rand(3, 4))
    assert "`watched::without` has no fake" in watch.faults["watched::without"][0].message


def test_what_keeps_its_contract_passes_and_its_values_stand() -> None:
    watch, x, out = ContractWatch(), torch.rand(3, 4), torch.zeros(3, 4)
    with torch.inference_mode(), watch:
        torch.ops.watched.into(x, out)
    assert torch.equal(x, out) and watch.faults["watched::into"] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("model"))


def test_the_engine_s_operators_run_in_its_step(folder: Path) -> None:
    findings = list(check_operators(str(folder), dtype="auto", device="cpu", offline=True))
    assert findings and {each.state for each in findings} == {WORKS}, findings
    assert any("piecework::" in each.found for each in findings)


def test_a_check_leaves_the_model_s_result_alone(folder: Path) -> None:
    from piecework.api.folder import open_model
    from piecework.engine.generate import generate

    def tokens() -> list[int]:
        generation = generate(opened.step, [1, 2, 3], sites=opened.sites, dtype=opened.dtype, max_tokens=4)
        return generation.token_ids

    opened = open_model(str(folder), options=CompileOptions(mode="none"), offline=True)
    before = tokens()
    assert watch_steps(opened).shapes
    assert tokens() == before


def test_an_effect_that_a_compiler_would_remove_fails_the_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = LlamaMLP.forward

    def counting(self: LlamaMLP, x: Tensor) -> Tensor:
        torch.ops.cases.put(x)
        return inner(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", counting)
    options = CompileOptions(compiler="eager", verify=False).resolve()
    findings = check_model(
        str(folder), dtype="auto", device="cpu", options=options, store=pw.MemoryStore(), offline=True
    )
    failed = [finding for finding in findings if finding.state == FAILS]
    assert [finding.what for finding in failed] == ["program"]
    assert "operator `cases::put` is called for nothing" in failed[0].found
    assert "never removed" in failed[0].reason
