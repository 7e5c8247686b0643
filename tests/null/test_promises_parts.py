"""A model with several compilable parts: each has its record, its ranges and its events."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.api.stores import report_to_log
from piecework.compilers.eager import EagerCompiler
from piecework.errors import CompileError, OptionError, ShapeOutOfRange
from piecework.events import ArtifactCompiled, FallBack, Recorder, RecordHit, SplitDone
from piecework.store.protocol import PROGRAM


@pw.compilable(dynamic={"patches": {0: "patches"}})
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 8)
        self.width = 8

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.project(patches))

    def describe(self) -> str:
        return f"{self.width} wide"


@pw.compilable(dynamic={"input_ids": {0: "tokens"}})
class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, input_ids: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids) + picture)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.norm = nn.LayerNorm(8)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.norm(self.encoder(patches)).mean(0)


class Pictures(nn.Module):
    """What it does between its parts (a Python branch on data) would not trace to one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.decoder = Vision(), Decoder()

    def forward(self, patches: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        picture = self.vision(patches)
        if picture.sum() > 100:
            picture = picture / 2
        assert self.vision.encoder.describe() == "8 wide"
        return self.decoder(input_ids, picture)


PATHS = ("vision.encoder", "decoder")
EXAMPLES = {
    "vision.encoder": (torch.randn(6, 12),),
    "decoder": {"input_ids": torch.arange(5), "picture": torch.ones(8)},
}
SMALL = pw.CompileOptions(compiler="eager", max_num_batched_tokens=32, ranges=((1, 32),))
LARGE = pw.CompileOptions(compiler="eager", max_num_batched_tokens=64, ranges=((1, 16), (17, 64)))
OPTIONS = {"vision.encoder": SMALL, "decoder": LARGE}


def test_each_part_is_a_program() -> None:
    model, store, seen = Pictures().eval(), pw.MemoryStore(), Recorder()
    parts = pw.compile_parts(model, EXAMPLES, options=OPTIONS, store=store, observer=seen)
    with torch.no_grad():
        for patches, tokens in ((6, 5), (32, 64), (1, 1)):
            given = torch.randn(patches, 12), torch.arange(tokens) % 16
            assert torch.allclose(parts(*given), model(*given), atol=1e-6)
            assert torch.equal(parts.model.vision.encoder(given[0]), parts["vision.encoder"](given[0]))
    assert tuple(parts) == PATHS
    assert len({program.key for program in parts.values()}) == 2
    assert store.list_records(PROGRAM) == sorted(program.key for program in parts.values())
    assert [event.part for event in seen.of(SplitDone)] == list(PATHS)
    assert [event.part for event in seen.of(ArtifactCompiled)] == ["vision.encoder"] * 2 + ["decoder"] * 3
    assert {event.part for event in seen.events} == set(PATHS)
    with pytest.raises(ShapeOutOfRange, match=r"`patches` is `33`; the program serves `1` to `32`"):
        parts(torch.randn(33, 12), torch.arange(5))
    with pytest.raises(ShapeOutOfRange, match=r"`tokens` is `65`; the program serves `1` to `64`"):
        parts(torch.randn(3, 12), torch.arange(65) % 16)


def test_the_model_stays_as_it_was() -> None:
    model = Pictures().eval()
    names = list(model.state_dict())
    parts = pw.compile_parts(model, EXAMPLES, options=SMALL, store=pw.MemoryStore())
    assert isinstance(model.vision.encoder, Encoder)
    assert isinstance(model.decoder, Decoder)
    assert parts.model is not model
    assert parts.model.vision.norm is model.vision.norm
    assert list(parts.model.state_dict()) == names
    # The weights are the model's own: what is loaded into it is seen by the programs.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
        given = torch.randn(4, 12), torch.arange(3)
        assert torch.allclose(parts(*given), model(*given), atol=1e-6)


def test_a_second_start_finds_both() -> None:
    store, again = pw.MemoryStore(), Recorder()
    first = pw.compile_parts(Pictures().eval(), EXAMPLES, options=OPTIONS, store=store)
    with pw.no_compile():
        second = pw.compile_parts(Pictures().eval(), EXAMPLES, options=OPTIONS, store=store, observer=again)
    assert {path: program.key for path, program in second.items()} == {path: p.key for path, p in first.items()}
    assert [event.part for event in again.of(RecordHit)] == list(PATHS)
    assert again.of(ArtifactCompiled) == []
    loaded = pw.load(store, key=first["decoder"].key, weights=Pictures().decoder.state_dict())
    assert loaded(torch.arange(3), torch.ones(8)).shape == (3, 16)


def test_one_part_goes_stale_without_the_other() -> None:
    store, again = pw.MemoryStore(), Recorder()
    pw.compile_parts(Pictures().eval(), EXAMPLES, options=OPTIONS, store=store)
    wider = OPTIONS | {"decoder": SMALL}
    pw.compile_parts(Pictures().eval(), EXAMPLES, options=wider, store=store, observer=again)
    assert [event.part for event in again.of(RecordHit)] == ["vision.encoder"]
    assert {event.part for event in again.of(ArtifactCompiled)} == {"decoder"}


def test_a_line_of_the_log_names_the_part(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(EagerCompiler):
        name = "failing"

        def compile(self, text: str, box: object) -> object:  # type: ignore[override]
            raise CompileError("it knows no tanh") if "tanh" in text else CompileError("nor this")

    options = pw.CompileOptions(compiler=Failing(), max_num_batched_tokens=32, ranges=((1, 32),), size_one=False)
    with caplog.at_level(logging.WARNING, "piecework"):
        pw.compile_parts(Pictures().eval(), EXAMPLES, options=options, store=pw.MemoryStore(), observer=report_to_log)
    lines = [record.getMessage() for record in caplog.records if record.name == "piecework"]
    assert [line.split(": ")[0] for line in lines] == list(PATHS)
    assert lines[0].endswith("runs eager: it knows no tanh")


def test_a_module_in_two_places_is_replaced_in_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Encoder()
            self.again = self.first

        def forward(self, patches: torch.Tensor) -> torch.Tensor:
            return self.first(patches) + self.again(patches)

    parts = pw.compile_parts(Twice(), {"first": (torch.randn(4, 12),)}, options=SMALL, store=pw.MemoryStore())
    assert parts.model.first is parts.model.again
    assert parts.model.again.program is parts["first"]


@pytest.mark.parametrize(
    ("examples", "options", "text"),
    [
        ({"vision.decoder": ()}, SMALL, "has no part `vision.decoder`"),
        ({"": ()}, SMALL, "a part's path is empty"),
        ({"vision": (), "vision.encoder": ()}, SMALL, "part `vision.encoder` lies inside part `vision`"),
        ({"decoder": ()}, {"encoder": SMALL}, "`encoder` is no part that has an example"),
    ],
)
def test_what_is_no_part_is_refused(examples: dict, options: object, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        pw.compile_parts(Pictures(), examples, options=options, store=pw.MemoryStore())  # type: ignore[arg-type]
    assert caught.value.hint


def test_an_event_of_a_whole_model_has_no_part() -> None:
    assert FallBack(what="piece 0", reason="").part == ""
