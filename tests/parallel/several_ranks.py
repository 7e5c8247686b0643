"""Run a function on several ranks at once: processes that a server forks, which has imported what they need."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

PRELOADED = [
    "torch", "transformers.models.auto.modeling_auto", "piecework.models.hugging_face", "piecework.api.llm",
    "piecework.api.led", "piecework.api.serving", "piecework.server.run",
]  # fmt: skip
PATIENCE_S = 500.0


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function of a module's top level on each rank; return its results, or exit codes of those that died.

    A rank that raises gives `{"error": …, "message": …}`. Raises TimeoutError where one hangs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_run, args=(rank, ranks, port, pipes[rank][1], function, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results = []
    try:
        for process, (reader, writer) in zip(processes, pipes, strict=True):
            writer.close()
            if not reader.poll(PATIENCE_S):
                raise TimeoutError(f"rank {len(results)} of {ranks} hangs")
            try:
                results.append(reader.recv())
            except EOFError:
                process.join(PATIENCE_S)
                results.append(process.exitcode)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return results


def _run(rank: int, ranks: int, port: int, writer: Any, function: Callable[..., Any], arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    import torch

    faulthandler.enable()  # a rank that dies tells where
    torch.set_num_threads(1)
    try:
        writer.send(function(*arguments))
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        traceback.print_exc()
        writer.send({"error": type(error).__name__, "message": str(error)})
    finally:
        writer.close()
        if torch.distributed.is_initialized() and rank == 0:
            torch.distributed.destroy_process_group()
