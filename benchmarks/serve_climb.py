"""Does a server that starts with an empty store, or loses its compiler, its store or its disk, ever fail a request?

    .venv/bin/python benchmarks/serve_climb.py [--scenes eager,cold,warm,kill,corrupt,planted,full]

`piecework serve` on the real model in float32, asked over HTTP by a fixed number of clients at a time until it serves
tier 1 (or is known not to), and some more. `eager` is what all others are compared with, token by token. `kill` ends
the compile process with SIGKILL, `corrupt` turns one bit in every blob of a filled store, `planted` puts an artifact
that computes something else in it, `full` gives the store a filesystem of 200 KiB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from measure import REPOSITORY, versions, write_result
from tiers import PROMPTS, WORDS

sys.path.insert(0, str(REPOSITORY / "scripts"))

HERE = pathlib.Path(__file__).resolve().parent
SCENES = ("eager", "cold", "warm", "kill", "corrupt", "planted", "full")
ANSWER, MARGIN = 12, 1e-3
MOST_S = 900.0
CAVEATS = (
    "Times are those of clients on the same cores as the server and the compiler.",
    "Tokens are compared up to the first whose logit leads the next by less than 0.001 in the eager run.",
    "`first_token_s` counts from the start of the process: imports and weights are in it.",
)


def main() -> None:
    """Run the scenes, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--requests", type=int, default=24, help="requests after the climb, and of the eager run")
    parser.add_argument("--threads", default="", help="OMP_NUM_THREADS of the server; empty leaves it to torch")
    parser.add_argument("--nice", default="10", help="how far the compile process stands back")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "serve_climb.json")
    arguments = parser.parse_args()
    readings: dict[str, Any] = {}
    expected: dict[int, tuple[list[str], list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="serve-climb-") as folder:
        for scene in arguments.scenes.split(","):
            run = Scene(scene, pathlib.Path(folder), arguments)
            readings[scene] = run.play(expected)
            print(scene, json.dumps(readings[scene]), flush=True)
    write_result(
        arguments.output,
        question="Does a server that climbs, or loses what it climbs by, fail a request or give a wrong token?",
        caveats=CAVEATS,
        body={
            "versions": versions("torch", "transformers"),
            "load": {"clients": arguments.clients, "answer_tokens": ANSWER},
            "server": {"threads": arguments.threads, "nice": arguments.nice},
            "readings": readings,
        },
    )


class Scene:
    """One server, its clients, and what is done to it."""

    def __init__(self, name: str, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
        self.name, self.folder, self.arguments = name, folder, arguments
        self.store = folder / {"warm": "cold"}.get(name, name)
        self.answers: list[tuple[int, list[str], list[float], float]] = []
        self.failed: list[str] = []
        self.compilers: set[int] = set()
        self.tier = self.killed = 0
        self._lock = threading.Lock()
        self._count = 0
        self._is_over = False

    def play(self, expected: dict[int, tuple[list[str], list[float]]]) -> dict[str, Any]:
        """Start the server, ask until it has climbed, ask some more, end it, and say what happened."""
        if self.name in ("corrupt", "planted"):
            shutil.copytree(self.folder / "cold", self.store)
            (flip_bits if self.name == "corrupt" else plant)(self.store)
        with self._server() as (process, port, opened_s, had_compiler):
            ready_s = self._wait_ready(port)
            first_s = time.monotonic() - self.began
            self._ask(port, 0)
            first_s = time.monotonic() - self.began
            clients = [threading.Thread(target=self._client, args=(port,)) for _ in range(self.arguments.clients)]
            for client in clients:
                client.start()
            climbed_at = self._until_climbed(process, port)
            end = climbed_at + self.arguments.requests
            while len(self.answers) < end and process.poll() is None and len(self.failed) < 10:
                time.sleep(0.2)
            self._is_over = True
            for client in clients:
                client.join()
            steps = metrics(port)
        if self.name == "eager":
            expected.update({number: (texts, margins) for number, texts, margins, _ in self.answers})
        took = sorted(seconds / ANSWER for *_, seconds in self.answers)
        return {
            "port_open_s": round(opened_s, 2), "compiler_ran_when_the_port_opened": had_compiler,
            "ready_s": round(ready_s, 2), "first_answer_s": round(first_s, 2), "answers": len(self.answers),
            "answers_before_tier_1": climbed_at, "tier": self.tier, "failed": self.failed[:3],
            "num_failed": len(self.failed), "wrong": self._wrong(expected), "compile_processes": len(self.compilers),
            "killed": self.killed, "steps_by_tier": steps,
            "per_token_ms": {"median": round(1e3 * statistics.median(took), 1), "max": round(1e3 * took[-1], 1)},
            "exit_code": process.returncode,
        }  # fmt: skip

    @contextlib.contextmanager
    def _server(self) -> Iterator[tuple[subprocess.Popen[str], int, float, bool]]:
        from real_model import real_model

        options = ["--enforce-eager"] if self.name == "eager" else ["--store", str(self.store)]
        command = [
            sys.executable, "-m", "piecework.cli.main", "serve", str(real_model()), "--dtype", "float32", "--port", "0",
            "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--num-pages", "512",
            "--compile-nice", self.arguments.nice, *options,
        ]  # fmt: skip
        if self.name == "full":
            self.store.mkdir()
            mount = 'mount -t tmpfs -o size=200k,mode=700 none "$0" && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mount, str(self.store), *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIECEWORK_")}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY / "src")}
        if self.arguments.threads:
            environment["OMP_NUM_THREADS"] = self.arguments.threads
        self.began = time.monotonic()
        with (self.folder / f"{self.name}.log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stderr=log, stdout=log, text=True)
        try:
            port = 0
            while not port:
                assert process.poll() is None, (self.folder / f"{self.name}.log").read_text()[-2000:]
                for line in (self.folder / f"{self.name}.log").read_text().splitlines():
                    if "listening at" in line:
                        port = int(line.rpartition(":")[2].strip("/ "))
                time.sleep(0.02)
            yield process, port, time.monotonic() - self.began, bool(compilers_of(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def _wait_ready(self, port: int) -> float:
        while get(port, "/readyz")[0] != 200:
            assert time.monotonic() - self.began < MOST_S
            time.sleep(0.05)
        return time.monotonic() - self.began

    def _until_climbed(self, process: subprocess.Popen[str], port: int) -> int:
        """Look until tier 1 serves, or nothing is compiled any more; return how many were answered before."""
        quiet = 0
        while self.name != "eager" and time.monotonic() - self.began < MOST_S and process.poll() is None:
            found = compilers_of(process.pid)
            if self.name == "kill" and found and not self.killed:
                time.sleep(3.0)  # it is at work
                os.kill(next(iter(found)), signal.SIGKILL)
                self.killed += 1
            self.compilers |= found
            self.tier = int(metrics(port, "piecework_tier").get("", 0))
            quiet = 0 if found else quiet + 1
            if self.tier or (self.name == "full" and self.compilers and quiet > 50):
                break
            time.sleep(0.2)
        return len(self.answers)

    def _client(self, port: int) -> None:
        while not self._is_over:
            with self._lock:
                self._count += 1
                number = self._count % PROMPTS
            try:
                self._ask(port, number)
            except OSError as error:
                self.failed.append(f"{type(error).__name__}: {error}")

    def _ask(self, port: int, number: int) -> None:
        prompt = " ".join(WORDS[(number + at) % len(WORDS)] for at in range(8 + number))
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        began = time.monotonic()
        status, answer = get(port, "/v1/completions", body)
        if status != 200 or answer["choices"][0]["finish_reason"] != "length":
            self.failed.append(f"{status}: {answer}")
            return
        told = answer["choices"][0]["logprobs"]
        tops = [sorted(each.values(), reverse=True) for each in told["top_logprobs"]]
        margins = [each[0] - each[1] for each in tops]
        self.answers.append((number, told["tokens"], margins, time.monotonic() - began))

    def _wrong(self, expected: dict[int, tuple[list[str], list[float]]]) -> int:
        wrong = 0
        for number, texts, _, _ in self.answers:
            if number not in expected:
                continue
            right, margins = expected[number]
            decided = next((at for at, margin in enumerate(margins) if margin < MARGIN), ANSWER)
            wrong += texts[:decided] != right[:decided]
        return wrong


def get(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    """Send one request; return its status and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(text) if "json" in (answer.getheader("content-type") or "") else text.decode()


def metrics(port: int, name: str = "piecework_tier_steps_total") -> dict[str, float]:
    """Return one metric by its label `tier`, or the empty text where it has none."""
    found = {}
    for line in get(port, "/metrics")[1].splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            labels, value = line.rsplit(" ", 1)
            found[labels.partition('tier="')[2].partition('"')[0]] = float(value)
    return found


def compilers_of(pid: int) -> set[int]:
    """Return the compile processes that a server has."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and b"engine.compile_process" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    found.add(int(entry.name))
    return found


def flip_bits(store: pathlib.Path) -> None:
    """Turn one bit in the middle of every blob."""
    for blob in (store / "blobs").rglob("*"):
        if blob.is_file():
            blob.chmod(0o644)
            data = bytearray(blob.read_bytes())
            data[len(data) // 2] ^= 1
            blob.write_bytes(bytes(data))


def plant(folder: pathlib.Path) -> None:
    """Put code that computes something else in the place of one artifact; its digest is right, its record is silent."""
    from piecework import DiskStore
    from piecework.stages.find import read_program
    from piecework.store.artifacts import write_artifact
    from piecework.store.protocol import ARTIFACT, PROGRAM
    from piecework.values.artifact import TEXT, Artifact

    store = DiskStore(folder)
    (key,) = store.list_records(PROGRAM)
    for piece in read_program(key, store).pieces:
        text = store.read_blob(piece.text).decode()
        changed = text.replace("silu", "sigmoid")
        if changed != text:
            for artifact_key in piece.artifacts.values():
                factors = store.read_record(ARTIFACT, artifact_key)["factors"]
                write_artifact(store, artifact_key, Artifact(TEXT, changed), factors)
            return
    raise SystemExit("no piece holds what is to be changed")


if __name__ == "__main__":
    main()
