"""The command `serve` on several ranks, each a process that a server forks, and what they print."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from parallel.several_ranks import PRELOADED, free_port
from server.serving import ask

SMALL = ("--num-pages", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--compiler", "eager")
NAME = "tiny"
PATIENCE_S = 240.0


@dataclass
class Served:
    """Ranks that serve: their processes, the port, and the files that hold what each printed."""

    port: int
    processes: list[Any]
    printed: list[Path]
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self) -> openai.OpenAI:
        """Return the real client."""
        url = f"http://127.0.0.1:{self.port}/v1"
        self.clients.append(openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60))
        return self.clients[-1]

    def ask(self, path: str) -> tuple[int, Any]:
        """Return the status and the body of an answer; status 0 where nobody answers."""
        try:
            status, _, body = ask(self.port, "GET", path)
        except OSError:
            return 0, None
        return status, body

    def metric(self, name: str) -> float:
        """Return one number of `/metrics`."""
        lines = str(self.ask("/metrics")[1]).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def signal(self, rank: int, number: int) -> None:
        """Send one rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def codes(self) -> list[int]:
        """Wait for the end of all ranks; return their exit codes."""
        until = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.join(max(0.1, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def texts(self) -> list[str]:
        """Return what each rank has printed."""
        return [file.read_text() for file in self.printed]

    def wait(self, condition: Any, what: str) -> None:
        """Wait until something holds."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            dead = [text for text, process in zip(self.texts(), self.processes, strict=True) if not process.is_alive()]
            if dead or time.monotonic() > until:
                raise AssertionError(f"waited for {what} in vain: " + "\n".join(dead or self.texts()))
            time.sleep(0.05)


@contextmanager
def serving(
    folder: Path, stores: list[Path], *flags: str, ranks: int = 2, wait: bool = True
) -> Iterator[Served]:
    """Serve a folder on several ranks until the block ends; each has a store of its own where there are as many."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, meeting = free_port(), free_port()
    printed = [stores[0].parent / f"rank-{rank}-{port}.txt" for rank in range(ranks)]
    processes = []
    for rank in range(ranks):
        store = stores[rank % len(stores)]
        given = ["serve", str(folder), "-tp", str(ranks), "--port", str(port), "--served-model-name", NAME]
        given += ["--store", str(store), *SMALL, *flags]
        printed[rank].touch()
        processes.append(context.Process(target=_run, args=(rank, ranks, meeting, printed[rank], given)))
    for process in processes:
        process.start()
    found = Served(port, processes, printed)
    try:
        if wait:
            found.wait(lambda: found.ask("/readyz")[0] == 200, "the server")
        yield found
    finally:
        for client in found.clients:
            client.close()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10)


def _run(rank: int, ranks: int, port: int, printed: Path, arguments: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with printed.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from piecework.cli.main import run

    torch.set_num_threads(1)
    sys.exit(run(arguments))
