"""The step context: who sees what, hooks, and what a body says outside one."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from piecework.errors import StepError
from piecework.ops import BODIES, PagedCache, Step, attention, current_step, kv_update, opaque_body, step_context


def make_step(**more: object) -> Step:
    sites = {site: PagedCache.allocate(1, 4, 1, 4, dtype=torch.float32) for site in ("a", "b")}
    values: dict[str, object] = {
        "slots": [0],
        "query_starts": [0, 1],
        "sequence_lengths": [1],
        "page_table": [[0]],
        "sites": sites,
    }
    return Step.from_lists(**{**values, **more})  # type: ignore[arg-type]


def test_outside_a_step_the_error_names_operator_and_site() -> None:
    row = torch.zeros(1, 1, 4)
    with pytest.raises(StepError) as caught:
        kv_update(row, row, "layers.7")
    assert str(caught.value) == (
        "`piecework::kv_update` was called at site `layers.7` outside a step\n"
        "hint: call the model or program under `with step_context(step):`; each thread needs its own"
    )
    assert caught.value.facts == {"op": "piecework::kv_update", "site": "layers.7"}


def test_steps_nest_and_end_with_their_block() -> None:
    outer, inner = make_step(), make_step()
    with step_context(outer):
        with step_context(inner):
            assert current_step("x::y", "a") is inner
        assert current_step("x::y", "a") is outer
        with pytest.raises(ZeroDivisionError), step_context(inner):
            _ = 1 / 0
        assert current_step("x::y", "a") is outer
    with pytest.raises(StepError):
        current_step("x::y", "a")


def test_threads_do_not_see_each_others_step() -> None:
    steps = [make_step() for _ in range(4)]
    barrier = threading.Barrier(4)
    seen: dict[int, object] = {}

    def work(index: int) -> None:
        with pytest.raises(StepError):
            current_step("x::y", "a")
        with step_context(steps[index]):
            barrier.wait()
            row = torch.full((1, 1, 4), float(index + 1))
            kv_update(row, row, "a")
            barrier.wait()
            seen[index] = steps[index].sites["a"].pages[0, 0, 0, 0, 0].item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}


def test_hooks_run_before_and_after_each_body() -> None:
    said: list[str] = []
    step = make_step(
        before=(lambda op, site: said.append(f"before {op} {site}"),),
        after=(lambda op, site: said.append(f"after {op} {site}"),),
    )
    row = torch.ones(1, 1, 4)
    with step_context(step):
        attention(row, kv_update(row, row, "b"), row.clone(), 1.0, 0, 0.0, None, "b")
        with opaque_body("my::op", "a") as inside:
            assert inside is step
            said.append("body")
    assert said == [
        "before piecework::kv_update b",
        "after piecework::kv_update b",
        "before piecework::attention b",
        "after piecework::attention b",
        "before my::op a",
        "body",
        "after my::op a",
    ]


def test_the_layout_is_planned_once_a_step() -> None:
    step = make_step()
    assert step.layout(4) is step.layout(4)


def test_any_object_may_be_a_sites_state() -> None:
    state = object()
    step = make_step(sites={"mine": state})
    assert step.state("my::op", "mine") is state
    with pytest.raises(StepError, match="`my::op` ran at site `other`"):
        step.state("my::op", "other")


def test_operators_are_registered_with_fakes() -> None:
    for name, body in BODIES.items():
        op = getattr(torch.ops.piecework, name.partition("::")[2]).default
        assert op.name() == name
        assert callable(body)
    row = torch.zeros(1, 1, 4, device="meta")
    token = torch.ops.piecework.kv_update(row, row, "a")
    assert token.device.type == "meta" and token.shape == (0,)
    assert torch.ops.piecework.attention(row, token, row, 1.0, 0, 0.0, None, "a") is None
    assert torch.ops.piecework.attention.default._schema.arguments[2].alias_info.is_write


def test_a_dispatched_call_imports_no_compiler() -> None:
    code = """
import sys, torch
from piecework.ops import PagedCache, Step, step_context
cache = PagedCache.allocate(1, 4, 1, 4, dtype=torch.float32)
step = Step.from_lists(slots=[0], query_starts=[0, 1], sequence_lengths=[1], page_table=[[0]], sites={"a": cache})
row = torch.ones(1, 1, 4)
with torch.no_grad(), step_context(step):
    out = torch.empty_like(row)
    torch.ops.piecework.attention(row, torch.ops.piecework.kv_update(row, row, "a"), out, 1.0, 0, 0.0, None, "a")
print(out.sum().item(), [m for m in ("torch._dynamo", "torch._inductor", "sympy") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4.0 []\n"


def test_opcheck_agrees_with_schema_and_fake() -> None:
    row = torch.randn(1, 1, 4)
    with step_context(make_step()):
        checks = ("test_schema", "test_faketensor")
        kv = torch.library.opcheck(torch.ops.piecework.kv_update.default, (row, row + 1, "a"), test_utils=checks)
        arguments = (row, row.new_empty(0), torch.empty_like(row), 1.0, 0, 0.0, None, "a")
        attended = torch.library.opcheck(torch.ops.piecework.attention.default, arguments, test_utils=checks)
    assert set(kv.values()) == set(attended.values()) == {"SUCCESS"}
