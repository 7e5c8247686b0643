"""Ranks that serve: the answers of one process, tiers that change on all at one step, and one end for all."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from pathlib import Path

import openai
import pytest

import piecework as pw
from engine.counting import drain, request, tokens
from parallel.served_ranks import NAME, Served, serving
from piecework.api.folder import build_folder
from piecework.api.serving import open_engine, serving_options
from piecework.engine.options import EngineOptions
from server.serving import tiny_folder

PROMPTS = [[5, 6, 7, 8 + number] for number in range(6)] + [[3], list(range(3, 60))]
LENGTH = 12
GONE = "another rank has ended or answers no more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    """Return what one process answers."""
    options = EngineOptions(num_pages=128, max_num_sequences=8, max_num_batched_tokens=32, enforce_eager=True)
    engine = open_engine(folder, engine=options)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(request(str(number), prompt, max_tokens=LENGTH))
    found = drain(engine)
    assert all(len(tokens(found[str(number), 0])) == LENGTH for number in range(len(PROMPTS)))
    return ["".join(output.text for output in found[str(number), 0]) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build what a server of two ranks starts from, in this process."""
    store = tmp_path_factory.mktemp("built") / "store"
    given = pw.CompileOptions(compiler="eager", tensor_parallel_size=2)
    options = serving_options(given, EngineOptions(max_num_sequences=8, max_num_batched_tokens=32))
    build_folder(folder, options=options, store=pw.DiskStore(store))
    return store


def check_answers(served: Served, alone: list[str]) -> None:
    """Ask all prompts at once, with others among them that nobody waits for."""
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = served.client().completions.create(
            model=NAME, prompt=PROMPTS[number], max_tokens=LENGTH, temperature=0
        )
        found[number] = answer.choices[0].text

    def ask_and_leave() -> None:
        stream = served.client().completions.create(
            model=NAME, prompt=[9, 9, 9], max_tokens=180, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    asking += [threading.Thread(target=ask_and_leave) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert [found.get(number) for number in range(len(PROMPTS))] == alone


def is_idle(served: Served) -> bool:
    return served.metric("vllm:num_requests_running") == served.metric("vllm:num_requests_waiting") == 0


def test_two_ranks_answer_as_one_process_does(folder: Path, alone: list[str], built: Path) -> None:
    """With aborted requests among them, compiled from the first step on; an open answer ends before the ranks do."""
    with serving(folder, [built]) as served:
        check_answers(served, alone)
        served.wait(lambda: is_idle(served), "the aborted requests' end")
        assert served.metric("vllm:kv_cache_usage_perc") == 0
        assert served.metric("piecework_tier ") == 1
        assert served.metric('piecework_tier_steps_total{tier="0"}') == 0
        stream = served.client().completions.create(
            model=NAME, prompt=[5, 6], max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [next(iter(stream))]
        for rank in (0, 1):  # a launcher tells all of them
            served.signal(rank, signal.SIGTERM)
        pieces += stream
        assert len(pieces) == 200 and pieces[-1].choices[0].finish_reason == "length"
        assert served.codes() == [0, 0]
        texts = served.texts()
    assert "listening at" in texts[0] and "listening at" not in texts[1]
    assert not any("error:" in text for text in texts)


def test_a_rank_that_is_killed_ends_all_with_one_message(folder: Path, tmp_path: Path) -> None:
    with serving(folder, [tmp_path / "store"], "--enforce-eager") as served:
        stream = served.client().completions.create(
            model=NAME, prompt=[5, 6], max_tokens=240, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        served.signal(1, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=GONE):
            list(stream)
        assert served.codes() == [1, -signal.SIGKILL]
        told, silent = served.texts()
    assert told.count(GONE) == 1 and "hint: " in told
    assert silent.count("error") == 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--wait-for", "compiled"), ("--passes", "sequence_parallel")])
def test_what_is_compiled_beside_comes_in_on_all_ranks(
    folder: Path, alone: list[str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Each rank has a store of its own: rank 0's process compiles, and the other rank is sent what it made."""
    stores = [tmp_path / "first", tmp_path / "second"]
    with serving(folder, stores, *flags) as served:
        check_answers(served, alone)
        if not flags:
            assert served.metric("piecework_tier ") == 0
        while served.metric("piecework_tier ") == 0:
            check_answers(served, alone)
        check_answers(served, alone)
        assert served.metric('piecework_tier_steps_total{tier="1"}') > 0
        served.signal(0, signal.SIGTERM)
        assert served.codes() == [0, 0]
    blobs = [sorted(path.name for path in (store / "blobs").rglob("*") if path.is_file()) for store in stores]
    assert blobs[0] == blobs[1] != []
    for gone in stores:  # one rank cold, the other warm
        shutil.rmtree(gone)
        with serving(folder, stores, *flags) as served:
            assert served.metric("piecework_tier ") == 1
            check_answers(served, alone)
            assert served.metric('piecework_tier_steps_total{tier="0"}') == 0
            served.signal(1, signal.SIGTERM)  # any rank that is asked to end ends all
            assert served.codes() == [0, 0]


@pytest.mark.slow
def test_ranks_that_wait_for_long_sleep_and_are_there(folder: Path, alone: list[str], built: Path) -> None:
    with serving(folder, [built], "--rank-timeout-s", "2") as served:
        before = [_cpu_s(process.pid) for process in served.processes]
        time.sleep(9)
        spent = [_cpu_s(process.pid) - start for process, start in zip(served.processes, before, strict=True)]
        assert max(spent) < 4.5, "half a core: a rank that waits does not spin"
        check_answers(served, alone)
        served.signal(0, signal.SIGINT)
        assert served.codes() == [0, 0]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "codes"),
    [(1, signal.SIGKILL, [1, -9]), (0, signal.SIGKILL, [-9, 1])],
)
def test_ranks_that_wait_find_one_gone(
    folder: Path, built: Path, rank: int, how: int, codes: list[int]
) -> None:
    with serving(folder, [built]) as served:
        served.signal(rank, how)
        assert served.codes() == codes
        assert served.texts()[1 - rank].count(GONE) == 1


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["port", "weights"])
def test_a_start_that_fails_on_one_rank_is_told_once(folder: Path, built: Path, spoil: str, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    flags: tuple[str, ...] = ()
    if spoil == "port":
        flags, said = ("--host", "nowhere.invalid"), "`nowhere.invalid` is no address"
    else:
        (broken / "model.safetensors").unlink()
        said = "there are no weights in"
    with serving(broken, [built], *flags, wait=False) as served:
        codes, text = served.codes(), "".join(served.texts())
    assert min(codes) > 0
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    # Who tells is asked of the store that rank 0 holds here; a rank that comes after its end says that it is alone.
    assert [said in each for each in errors] == [True] + [False] * (len(errors) - 1)
    assert all("another rank has ended" in each for each in errors[1:])
