"""Memory that an argument shares with what a model holds: right where nothing is written, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecework as pw
from case_operators import assert_same, compile_case, rows
from piecework.errors import BindError, InputError, TraceError

ops = torch.ops.cases
Call = Callable[[nn.Module], tuple[Any, ...]]


class Holds(nn.Module):
    """What the cases hold: a weight, a buffer, one that is not saved, a plain tensor, and an arena of two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(32.0).view(8, 4), requires_grad=False)
        self.register_buffer("seen", torch.arange(32.0).view(8, 4))
        self.register_buffer("unsaved", torch.arange(32.0).view(8, 4), persistent=False)
        self.plain = torch.arange(32.0).view(8, 4)
        arena = torch.arange(64.0).view(16, 4)
        self.arena = [arena[8:]]
        self.register_buffer("lower", arena[:8], persistent=False)


class WritesBuffer(Holds):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x * 2 + self.seen[0] + self.weight[1]


class WritesViews(Holds):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.view(-1)[2:].unsqueeze(0).mul_(2)
        for row in self.unsaved.split(2)[1].unbind():
            row.sub_(x[0])
        return ops.fresh(x) + self.seen[0] + self.unsaved[3]


class WritesPlain(Holds):
    def forward(self, x: Tensor) -> Tensor:
        self.plain[0] = x[0]
        return x * 2 + self.plain[1]


class WritesWeight(Holds):
    def forward(self, x: Tensor) -> Tensor:
        torch.add(self.unsaved[1:], 1, out=self.weight[:-1])
        return x @ self.weight.t()


class WritesByOperator(Holds):
    def forward(self, x: Tensor) -> Tensor:
        ops.into(self.seen * 2, self.seen)
        return x * 2 + self.seen[0]


class WritesArgument(Holds):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[0] = 7.0
        return ops.fresh(x) + self.weight[0] + self.plain[0]


class WritesHalf(Holds):
    def forward(self, x: Tensor) -> Tensor:
        self.lower.add_(1)
        return x * 2 + self.lower[0]


class WritesOptional(Holds):
    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        if cache is not None:
            cache.add_(x[0])
        return x + self.seen[0]


class WritesNothing(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return ops.fresh(x) @ self.weight.t() + self.seen.sum(1)


class ReadsShapeOfArgument(Holds):
    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        self.seen.add_(1)
        return x * 2 + self.seen[0] + like.shape[1]


BUFFER = "argument `x` shares memory with the buffer `seen`, and the model writes to the buffer"
WEIGHT = "argument `x` shares memory with the weight `weight`, and the model writes to the weight"
PLAIN = "argument `x` shares memory with the constant `plain`, and the model writes to the constant"
REFUSED: list[tuple[type[Holds], Call, str]] = [
    (WritesBuffer, lambda m: (m.seen,), BUFFER),
    (WritesBuffer, lambda m: (m.seen[2:4],), BUFFER),
    (WritesBuffer, lambda m: (m.seen.view(-1)[3:11].view(2, 4),), BUFFER),
    (WritesViews, lambda m: (m.seen[:1],), BUFFER),
    (WritesViews, lambda m: (m.unsaved[2:],), BUFFER.replace("seen", "unsaved")),
    (WritesPlain, lambda m: (m.plain[:2],), PLAIN),
    (WritesWeight, lambda m: (m.weight,), WEIGHT),
    (WritesWeight, lambda m: (m.weight.data[5:],), WEIGHT),
    (WritesByOperator, lambda m: (m.seen[4:],), BUFFER),
    (WritesArgument, lambda m: (m.weight.data[:3],), "with the weight `weight`, and the model writes to the argument"),
    (WritesArgument, lambda m: (m.plain[:1],), "with the constant `plain`, and the model writes to the argument"),
    (WritesHalf, lambda m: (m.lower[:2],), BUFFER.replace("seen", "lower")),
]  # fmt: skip
SERVED: list[tuple[type[Holds], Call]] = [
    (WritesBuffer, lambda m: (m.weight,)),
    (WritesBuffer, lambda m: (m.unsaved[1:3],)),
    (WritesArgument, lambda m: (m.seen[2:5],)),
    (WritesHalf, lambda m: (m.arena[0][:3],)),
    (WritesNothing, lambda m: (m.weight,)),
    (WritesNothing, lambda m: (m.seen[3:],)),
]


def _names(pairs: list[Any]) -> list[str]:
    return [f"{pair[0].__name__}{number}" for number, pair in enumerate(pairs)]


@pytest.mark.parametrize(("model", "arguments", "words"), REFUSED, ids=_names(REFUSED))
def test_an_argument_over_memory_that_is_written_is_refused(model: type[Holds], arguments: Call, words: str) -> None:
    own = model()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    program = compile_case(own, rows(5))
    with pytest.raises(InputError) as raised:
        program(*arguments(own))
    assert words in raised.value.message
    assert_same(dict(own.state_dict()), before)
    copied = [tensor.clone() for tensor in arguments(own)]
    twin = model()
    assert_same(program(*copied), twin(*[tensor.clone() for tensor in arguments(twin)]))


@pytest.mark.parametrize(("model", "arguments"), SERVED, ids=_names(SERVED))
def test_an_argument_over_memory_that_only_is_read_is_served(model: type[Holds], arguments: Call) -> None:
    own, twin = model(), model()
    program = compile_case(own, rows(5))
    assert_same(program(*arguments(own)), twin(*arguments(twin)))
    assert_same(dict(own.state_dict()), dict(twin.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "arguments"), [*SERVED[:4], SERVED[5]], ids=_names([*SERVED[:4], SERVED[5]]))
def test_an_argument_over_memory_that_only_is_read_is_served_when_compiled(model: type[Holds], arguments: Call) -> None:
    own, twin = model(), model()
    options = {"compiler": "inductor", "ranges": ((1, 65),), "max_num_batched_tokens": 65}
    program = compile_case(own, rows(5), options=options)
    assert_same(program(*arguments(own)), twin(*arguments(twin)), exact=False)
    assert_same(dict(own.state_dict()), dict(twin.state_dict()), exact=False)


def test_an_argument_of_which_only_the_shape_is_read_may_lie_anywhere() -> None:
    own, twin = ReadsShapeOfArgument(), ReadsShapeOfArgument()
    program = compile_case(own, (*rows(5), torch.rand(8, 4)))
    assert_same(program(rows(3)[0] * 0, own.seen), twin(rows(3)[0] * 0, twin.seen))


def test_an_optional_argument_that_is_written_may_not_be_what_is_held() -> None:
    model = WritesOptional()
    alone = compile_case(model, rows(5))
    assert torch.equal(alone(model.seen[:2]), model(model.seen[:2]))
    program = compile_case(model, (*rows(5), torch.rand(8, 4)))
    with pytest.raises(
        InputError, match="argument `cache` shares memory with the buffer `seen`.*writes to the argument"
    ):
        program(*rows(3), model.seen)
    with pytest.raises(InputError, match="arguments `x` and `cache` share memory"):
        program((cache := torch.rand(8, 4))[:3], cache)


def test_a_warm_start_refuses_the_same(tmp_path: Any) -> None:
    store = pw.DiskStore(tmp_path)
    compile_case(WritesBuffer(), rows(5), store=store)
    model = WritesBuffer()
    program = compile_case(model, rows(5), store=store)
    with pytest.raises(InputError, match="shares memory with the buffer `seen`"):
        program(model.seen)
    x = rows(3)[0]
    assert torch.equal(program(x), WritesBuffer()(x))


class SharesByItself(nn.Module):
    """Two names of one memory, of which forward writes one."""

    def __init__(self, hold: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(32.0).view(8, 4))
        hold(self, self.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x * 2 + self.read()

    def read(self) -> Tensor:
        return self.other.flatten()[:4]


class SharesInList(SharesByItself):
    def read(self) -> Tensor:
        return self.other[0][1]


SHARED: list[tuple[type[SharesByItself], Callable[[nn.Module, Tensor], Any], str]] = [
    (SharesByItself, lambda m, t: m.register_buffer("other", t[:2]), "the buffer `other`"),
    (SharesByItself, lambda m, t: m.register_buffer("other", t.detach(), persistent=False), "the buffer `other`"),
    (SharesByItself, lambda m, t: setattr(m, "other", nn.Parameter(t.view(16, 2), False)), "the weight `other`"),
    (SharesByItself, lambda m, t: setattr(m, "other", t.t()), "the constant `other`"),
    (SharesInList, lambda m, t: setattr(m, "other", [t[:2]]), "the constant `other[0]`"),
]


@pytest.mark.parametrize(("model", "hold", "name"), SHARED)
def test_two_names_of_memory_that_is_written_are_refused_with_the_line(model: Any, hold: Any, name: str) -> None:
    with pytest.raises(TraceError) as raised:
        compile_case(model(hold), rows(5))
    said = raised.value.message
    assert f"the buffer `seen` and {name} share memory, and forward writes to buffer `seen` at {__file__}:" in said


def test_one_tensor_under_two_names_is_served() -> None:
    model, twin = (SharesByItself(lambda m, t: m.register_buffer("other", t)) for _ in range(2))
    program, x = compile_case(model, rows(5)), rows(3)[0]
    assert torch.equal(program(x), twin(x))
    assert torch.equal(program(x), twin(x))


GLOBAL = torch.arange(32.0).view(8, 4)


class ReadsGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", GLOBAL[:4])

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return x + GLOBAL[1]


def test_a_global_over_a_buffer_that_is_written_is_named() -> None:
    with pytest.raises(TraceError, match=r"the buffer `seen` and the tensor `.*GLOBAL` share memory"):
        compile_case(ReadsGlobal(), rows(5))


def test_an_example_over_a_buffer_that_is_written_is_named() -> None:
    class Fixed(Holds):
        def forward(self, y: Tensor) -> Tensor:
            self.seen.add_(1)
            return y * 2 + self.seen[0]

    model = Fixed()
    with pytest.raises(TraceError, match="`seen` and argument `y` share memory.*writes to buffer `seen`"):
        compile_case(model, (model.seen,), dynamic={})


def test_weights_that_come_to_share_memory_are_refused_when_bound() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(4))
            self.register_buffer("two", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.one.add_(1)
            return x + self.two

    program = compile_case(Two(), rows(5))
    both = torch.zeros(4)
    with pytest.raises(BindError, match="weights `one` and `two` share memory, and the model writes to `one`"):
        program.refresh({"one": both, "two": both.view(4)})


def test_two_programs_over_one_buffer_see_each_other_s_writes() -> None:
    class Reads(nn.Module):
        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.register_buffer("kept", seen)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.kept[0]

    writer, twin = WritesBuffer(), WritesBuffer()
    writes, reads = compile_case(writer, rows(5)), compile_case(Reads(writer.seen), rows(5))
    x = rows(3)[0]
    for _ in range(3):
        assert torch.equal(writes(x), twin(x))
        assert torch.equal(reads(x), x + twin.seen[0])
    assert torch.equal(reads(writer.seen), twin.seen + twin.seen[0])
