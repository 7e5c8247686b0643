"""Parallel linears become one product: what is taken, what is left alone and why, and whose memory the weights are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import piecework as pw
from piecework.events import ArtifactCompiled, Recorder
from piecework.store.protocol import PROGRAM
from piecework.values.difference import compare

_library = torch.library.Library("merge_test", "FRAGMENT")
_library.define("mix(Tensor x) -> Tensor")
_library.define("strides(Tensor x) -> Tensor")
_library.impl("mix", lambda x: x + x.sum(0), "CPU")
_library.impl("strides", lambda x: x * x.stride(0), "CPU")
for _name in ("mix", "strides"):
    torch.library.register_fake(f"merge_test::{_name}", lambda x: torch.empty(x.shape, dtype=x.dtype), lib=_library)

WIDTHS = {"query": 16, "key": 8, "value": 8}


class Parallel(nn.Module):
    """Linears of one input, of several widths."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, width in WIDTHS.items():
            setattr(self, name, nn.Linear(16, width, bias=bias, dtype=dtype))
        self.last = nn.Linear(32, 16, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        heads = query.view(-1, 2, 8).transpose(0, 1) * key.unsqueeze(0)
        return self.last(torch.cat((heads.sum(0), key, value, key), -1))


EVERYWHERE = ("merge_linears_everywhere",)


def compiled(
    model: nn.Module, *, store: Any = None, observer: Any = None, passes: tuple[str, ...] = EVERYWHERE
) -> Any:
    options = pw.CompileOptions(
        compiler="eager", passes=passes, split_ops=("merge_test::mix",), ranges=((1, 64),), max_num_batched_tokens=64
    )
    example = (torch.rand(5, 16, dtype=model.last.weight.dtype),)  # type: ignore[union-attr]
    return pw.compile(
        model.eval(), example, dynamic={"x": {0: "tokens"}}, options=options,
        store=store if store is not None else pw.MemoryStore(), observer=observer,
    )  # fmt: skip


def report_of(program: Any, store: Any) -> dict[str, Any]:
    (report,) = store.read_record(PROGRAM, program.key)["notes"]["passes"]
    return report  # type: ignore[no-any-return]


def hold_to_the_rule(model: nn.Module, program: Any, sizes: tuple[int, ...] = (1, 2, 9, 64)) -> None:
    """Judge the program beside eager by the one tolerance rule, against the model in higher precision."""
    exact = copy.deepcopy(model).double()
    for size in sizes:
        x = torch.randn(size, 16, dtype=next(model.parameters()).dtype)
        with torch.no_grad():
            difference = compare("result", program(x), model(x), exact(x.double()))
        assert not difference.is_fault, difference.fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_parallel_linears_are_one_product(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    store, model = pw.MemoryStore(), Parallel(bias=bias, dtype=dtype)
    program = compiled(model, store=store)
    report = report_of(program, store)
    assert (report["matches"], report["places"], report["misses"]) == (1, ["query + key + value"], [])
    record = store.read_record(PROGRAM, program.key)
    text = "".join(store.read_blob(piece["text"]).decode() for piece in record["pieces"])
    assert text.count("linear(") == 2
    hold_to_the_rule(model, program)


# --------------------------------------------------------------------------------------------------- left alone


class Tied(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(self.key(x), self.value.weight.T)


class MixedDtypes(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        key = nn.functional.linear(x, self.key.weight.float())  # a cast elsewhere: the weight is computed
        return self.query(x).sum(-1, keepdim=True) * key


class ExtraUser(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x).sum() + self.key.weight.sum()


class Buffers(Parallel):
    def __init__(self) -> None:
        super().__init__()
        weight = self.key.weight.detach().clone()
        del self.key
        self.register_buffer("key_weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * nn.functional.linear(x, self.key_weight).sum()


class OneBias(Parallel):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x).sum()


class WrittenInput(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        query = self.query(y)
        y.add_(1)
        return query * self.key(y).sum()


class WrittenResult(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        query.view(-1, 2, 8).mul_(3)
        return query * key.sum()


class AcrossACut(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.merge_test.mix(self.query(x))
        return y * self.key(x).sum()


class CastBetween(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x.double().float() + 0).sum()


class ReturnsAWeight(Parallel):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.query(x) * self.key(x).sum(), self.key.weight


LEFT_ALONE = [
    (Tied, "its weight is used elsewhere as well"),
    (MixedDtypes, ""),
    (ExtraUser, "key.weight: its weight is used elsewhere as well"),
    (Buffers, "key_weight: its weight is a buffer, no parameter"),
    (OneBias, "their biases or dtypes differ"),
    (WrittenInput, ""),
    (WrittenResult, "query.weight: its result is written to in place"),
    (AcrossACut, ""),
    (CastBetween, ""),
    (ReturnsAWeight, "key.weight: its weight is used elsewhere as well"),
]


@pytest.mark.parametrize(("kind", "reason"), LEFT_ALONE, ids=[kind.__name__ for kind, _ in LEFT_ALONE])
def test_what_does_not_fit_is_left_alone(kind: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    store, model = pw.MemoryStore(), kind()
    program = compiled(model, store=store)
    report = report_of(program, store)
    assert report["matches"] == 0, report
    assert reason in " / ".join(report["misses"])
    x = torch.rand(7, 16)
    with torch.no_grad():
        wanted = model(x.clone())
    torch.testing.assert_close(program(x.clone()), wanted)


def test_quantised_weights_are_left_alone() -> None:
    class Quantised(Parallel):
        def __init__(self) -> None:
            super().__init__()
            for name in ("query", "key"):
                linear = getattr(self, name)
                linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.query.weight.float()) + self.value(x).repeat(1, 2)

    store, model = pw.MemoryStore(), Quantised()
    program = compiled(model, store=store)
    assert report_of(program, store)["matches"] == 0


# --------------------------------------------------------------------------------------------------------- strides


class Strides(Parallel):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        query, key, value = self.query(x), self.key(x), self.value(x)
        return torch.ops.merge_test.strides(query), key, value.view(-1)


def test_operators_and_callers_see_the_strides_that_they_saw() -> None:
    torch.manual_seed(0)
    store, model = pw.MemoryStore(), Strides()
    program = compiled(model, store=store)
    assert report_of(program, store)["matches"] == 1
    for size in (1, 2, 9):
        x = torch.rand(size, 16)
        with torch.no_grad():
            wanted = model(x)
        for got, right in zip(program(x), wanted, strict=True):
            assert got.stride() == right.stride()
            torch.testing.assert_close(got, right)


# ------------------------------------------------------------------------------------------------- whose memory it is


def test_the_models_parameters_are_views_of_the_joined_weight() -> None:
    torch.manual_seed(0)
    model = Parallel()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    program = compiled(model)
    parts = [getattr(model, name).weight for name in WIDTHS]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() == sum(part.numel() * part.element_size() for part in parts)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert set(program.weights) == set(before)
    assert program.check() == ()


def test_a_write_to_a_parameter_reaches_the_program_and_a_new_one_is_seen() -> None:
    torch.manual_seed(0)
    model = Parallel()
    program = compiled(model)
    with torch.no_grad():
        model.key.weight.mul_(2)
    hold_to_the_rule(model, program)
    model.key.weight = nn.Parameter(torch.rand(8, 16))
    (finding,) = program.check()
    assert finding.startswith("weight `key.weight` of the model is another tensor")
    program.refresh()
    hold_to_the_rule(model, program)
    assert program.check() == ()


def test_two_programs_of_one_model_share_the_joined_weight() -> None:
    torch.manual_seed(0)
    model = Parallel()
    first = compiled(model)
    place = model.query.weight.data_ptr()
    second, plain = compiled(model), compiled(model, passes=())
    assert model.query.weight.data_ptr() == place
    for program in (first, second, plain):
        hold_to_the_rule(model, program)


def test_a_warm_start_binds_from_safetensors_by_the_record(tmp_path: Path) -> None:
    torch.manual_seed(0)
    store, model = pw.MemoryStore(), Parallel(bias=True)
    program = compiled(model, store=store)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    recorder = Recorder()
    warm = pw.load(store, key=program.key, weights=tmp_path, observer=recorder)
    assert recorder.of(ArtifactCompiled) == []
    x = torch.rand(9, 16)
    assert torch.equal(warm(x), program(x))
    joined = {name: warm.weights[f"{name}.weight"] for name in WIDTHS}
    assert len({each.untyped_storage().data_ptr() for each in joined.values()}) == 1
    assert all(torch.equal(each, getattr(model, name).weight) for name, each in joined.items())
    plain = pw.load(store, key=program.key, weights=dict(model.state_dict()))
    assert torch.equal(plain(x), program(x))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    store, model = pw.MemoryStore(), Parallel()
    program = compiled(model, store=store)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "key.weight"}
    with pytest.raises(pw.errors.BindError, match=r"`key\.weight` is not in a state dict"):
        pw.load(store, key=program.key, weights=weights)
    wrong = {**model.state_dict(), "key.weight": torch.rand(8, 16, dtype=torch.float64)}
    with pytest.raises(pw.errors.BindError, match=r"weight `key\.weight` is `float64\[8, 16\] cpu`"):
        pw.load(store, key=program.key, weights=wrong)
