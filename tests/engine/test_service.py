"""The engine's thread: iterators, aborts by leaving, failures that everybody hears of."""

from __future__ import annotations

import asyncio
import threading

import pytest
from torch import Tensor

from engine.counting import Adding, expected, request, small_engine
from piecework.engine.loop import Engine
from piecework.engine.options import Progress
from piecework.engine.service import Report, Service
from piecework.errors import EngineError, OptionError


async def collect(service: Service, name: str, prompt: list[int], **parameters: object) -> list[int]:
    return [t async for o in service.generate(request(name, prompt, **parameters)) for t in o.token_ids]


def test_many_iterators_at_a_time_each_get_their_own() -> None:
    async def run() -> list[list[int]]:
        prompts = [[n + 1, n + 2] for n in range(12)]
        return await asyncio.gather(*(collect(service, f"r{n}", p, max_tokens=6) for n, p in enumerate(prompts)))

    service = Service(lambda report: small_engine()).start()
    service.wait_ready()
    try:
        assert asyncio.run(run()) == [expected([n + 1, n + 2], 6) for n in range(12)]
    finally:
        service.close()
    assert service.engine is not None and service.engine.pool.num_held == 0


def test_leaving_early_frees_what_was_held() -> None:
    async def run() -> None:
        stream = service.generate(request("gone", [1, 2, 3], max_tokens=40))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(service, "cancelled", [4, 5], max_tokens=40))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await collect(service, "next", [1], max_tokens=2) == expected([1], 2)

    service = Service(lambda report: small_engine()).start()
    service.wait_ready()
    asyncio.run(run())
    service.close()
    assert service.engine is not None and service.engine.pool.num_held == 0


def test_progress_is_told_before_the_engine_is_there_and_requests_say_so() -> None:
    may_go = threading.Event()

    def make(report: Report) -> Engine:
        report(Progress("loading", 62, 100))
        may_go.wait(10)
        return small_engine()

    service = Service(make).start()
    while str(service.status.progress) != "loading 62/100":
        pass
    assert not service.status.is_ready
    with pytest.raises(EngineError, match="the engine is not there yet \\(loading 62/100\\)"):
        asyncio.run(collect(service, "early", [1]))
    may_go.set()
    assert service.wait_ready(10) and service.status.is_ready
    with pytest.raises(OptionError, match="token id `99`"):
        asyncio.run(collect(service, "wrong", [99]))
    service.close()


def test_a_failure_is_heard_by_all_who_wait_and_all_who_come() -> None:
    class Failing(Adding):
        def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
            if len(self.steps) > 2:
                raise RuntimeError("the device is gone")
            return super().__call__(input_ids, position_ids, rows)

    async def run() -> None:
        results = await asyncio.gather(
            *(collect(service, f"r{n}", [1], max_tokens=9) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(each, EngineError) and "the device is gone" in str(each) for each in results)
        with pytest.raises(EngineError, match="the engine has failed"):
            await collect(service, "late", [1])

    service = Service(lambda report: small_engine(Failing())).start()
    service.wait_ready()
    asyncio.run(run())
    assert not service.status.is_ready and "the device is gone" in service.status.trouble
    service.close()


def test_an_engine_that_cannot_be_made_is_a_failure_with_its_reason() -> None:
    def make(report: Report) -> Engine:
        raise OptionError("no such folder", hint="name another")

    service = Service(make).start()
    with pytest.raises(OptionError, match="no such folder"):
        service.wait_ready()
    service.close()


def test_closing_tells_those_who_wait() -> None:
    gate = threading.Event()

    class Slow(Adding):
        def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
            gate.wait(0.01)
            return super().__call__(input_ids, position_ids, rows)

    async def run() -> None:
        task = asyncio.create_task(collect(service, "long", [1], max_tokens=60))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(service.close)
        with pytest.raises(EngineError, match="the engine is going"):
            await task

    service = Service(lambda report: small_engine(Slow())).start()
    service.wait_ready()
    asyncio.run(run())
