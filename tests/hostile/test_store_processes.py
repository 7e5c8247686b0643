"""Many processes on one folder: each piece of work once, killed at any step, on filesystems without locks too."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hostile.pieces import PIECES, compile_piece, content_of, start_cold
from hostile.processes import append, fork, kill, refuse_locks, wait, wait_for
from piecework.events import Recorder, StoreWarning
from piecework.store.disk import DiskStore
from piecework.store.flight import fly_once
from piecework.store.lease import NAMELESS_S
from piecework.store.owner import Owner, current_owner, is_dead, parse_owner, place
from piecework.values.digest import digest_bytes


class DieAt:
    """Kill this process, as nothing can be caught, before one step of its writes."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, step: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_killed_at_every_step_leaves_a_store_that_works(tmp_path: Path) -> None:
    kills, log = 0, tmp_path / "log"
    for step in range(1, 100):
        root = tmp_path / str(step)
        dying = DiskStore(root, on_step=DieAt(step))
        child = fork(lambda dying=dying: compile_piece(dying, "piece0", log))
        ended = wait(child)
        recorder = Recorder()
        store = DiskStore(root, observer=recorder)
        if store.has_record("artifact", "piece0"):
            record = store.read_record("artifact", "piece0")
            assert store.read_blob(record["blob"]) == content_of("piece0")
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
        start_cold(store, log, PIECES)
        assert recorder.of(StoreWarning) == []  # what was half-written has never been looked at
    assert kills == 19  # three files of six steps each, and the record's folder


@pytest.mark.parametrize("count", [2, 8])
def test_processes_that_start_cold_together_compile_each_piece_once(tmp_path: Path, count: int) -> None:
    gate, log, root = tmp_path / "gate", tmp_path / "log", tmp_path / "store"

    def work(number: int) -> None:
        wait_for(gate)
        order = random.Random(number).sample(PIECES, len(PIECES))
        start_cold(DiskStore(root, strict=True), log, order)

    children = [fork(lambda number=number: work(number)) for number in range(count)]
    gate.touch()
    assert [wait(child) for child in children] == [0] * count
    assert Counter(log.read_text().split()) == dict.fromkeys(PIECES, 1)


def test_threads_of_one_process_compile_each_piece_once(tmp_path: Path) -> None:
    store, log = DiskStore(tmp_path / "store"), tmp_path / "log"
    threads = [threading.Thread(target=start_cold, args=(store, log, PIECES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(log.read_text().split()) == dict.fromkeys(PIECES, 1)


def fly(root: Path, lock: Callable[[int, int], None] | None, done: Path, log: Path, linger_s: float = 0.003) -> None:
    """Do one piece of work once, with the locks given."""
    options = {} if lock is None else {"lock": lock}
    with fly_once(root, "work", done.exists, 30.0, **options) as flight:
        if flight.owned:
            append(log, "ran")
            time.sleep(linger_s)
            done.touch()
    assert done.exists()


LOCKS = [pytest.param(None, id="locks"), pytest.param(refuse_locks, id="leases")]


@pytest.mark.parametrize("lock", LOCKS)
def test_work_is_done_once_with_and_without_locks(tmp_path: Path, lock: Callable[[int, int], None] | None) -> None:
    for number in range(10):
        gate, done, log = (tmp_path / f"{name}{number}" for name in ("gate", "done", "log"))

        def work(gate: Path = gate, done: Path = done, log: Path = log) -> None:
            wait_for(gate)
            fly(tmp_path / "store", lock, done, log)

        children = [fork(work) for _ in range(6)]
        gate.touch()
        assert [wait(child) for child in children] == [0] * 6
        assert log.read_text() == "ran\n"


@pytest.mark.parametrize("lock", LOCKS)
def test_the_death_of_an_owner_is_noticed(tmp_path: Path, lock: Callable[[int, int], None] | None) -> None:
    done, log = tmp_path / "done", tmp_path / "log"
    for deaths in range(1, 4):
        owner = fork(lambda: fly(tmp_path / "store", lock, done, log, linger_s=60.0))
        while not log.exists() or len(log.read_text().split()) < deaths:
            time.sleep(0.001)
        waiters = [fork(lambda: fly(tmp_path / "store", lock, done, log, linger_s=60.0)) for _ in range(2)]
        time.sleep(0.02)
        for child in (*waiters, owner):
            kill(child)
    began = len(log.read_text().split())
    children = [fork(lambda: fly(tmp_path / "store", lock, done, log)) for _ in range(6)]
    assert [wait(child) for child in children] == [0] * 6
    assert len(log.read_text().split()) == began + 1


def test_a_child_of_a_dead_owner_does_not_keep_its_lock(tmp_path: Path) -> None:
    store, ready = DiskStore(tmp_path / "store"), tmp_path / "ready"

    def own() -> None:
        with store.single_flight("work"):
            (tmp_path / "number").write_text(str(fork(lambda: time.sleep(60))))
            (tmp_path / "number").rename(ready)
            time.sleep(60)

    owner = fork(own)
    wait_for(ready)
    kill(owner)
    with store.single_flight("work", timeout_s=20.0) as flight:
        assert flight.owned and flight.exclusive
    os.kill(int(ready.read_text()), signal.SIGKILL)


def test_a_nameless_lease_is_taken_away_once_it_is_old(tmp_path: Path) -> None:
    root, done, log = tmp_path / "store", tmp_path / "done", tmp_path / "log"
    fly(root, refuse_locks, tmp_path / "other", log)
    (left,) = [path for path in (root / "flights").iterdir() if path.name.endswith(".lock")]
    lease = left.with_name(f"{place()}.{left.stem}.lease")
    lease.touch()
    with pytest.raises(TimeoutError), fly_once(root, "work", done.exists, 0.05, lock=refuse_locks):
        pass
    os.utime(lease, (time.time() - 2 * NAMELESS_S,) * 2)
    fly(root, refuse_locks, done, log)
    assert not lease.exists() and [path.name for path in (root / "flights").iterdir()] == [left.name]


def test_after_a_timeout_the_work_is_done_all_the_same(tmp_path: Path) -> None:
    recorder = Recorder()
    held, other = DiskStore(tmp_path / "store"), DiskStore(tmp_path / "store", observer=recorder)
    with held.single_flight("work"), other.single_flight("work", timeout_s=0.02) as flight:
        assert flight.owned and not flight.exclusive
    (warning,) = recorder.of(StoreWarning)
    assert warning.reason == "`work` is not kept to one process (another process held the work all along)"


@pytest.mark.parametrize("count", [pytest.param(20, id="tenth"), pytest.param(200, id="full", marks=pytest.mark.soak)])
def test_random_kills_lose_nothing_and_leave_no_stuck_lock(tmp_path: Path, count: int) -> None:
    chance, root, log, kept = random.Random("kills"), tmp_path / "store", tmp_path / "log", tmp_path / "kept"

    def work(seed: int) -> None:
        order, store = random.Random(seed), DiskStore(root, strict=True)
        for turn in range(100):
            piece = f"{order.choice(PIECES)}.{seed % 7}.{turn}"
            with store.single_flight(piece, lambda piece=piece: store.has_record("artifact", piece)) as flight:
                if flight.owned:
                    digest = store.write_blob(content_of(piece))
                    store.write_record("artifact", piece, {"blob": digest, "piece": piece})
                    append(kept, piece)

    running = [fork(lambda number=number: work(number)) for number in range(3)]
    for number in range(count):
        time.sleep(chance.random() * 0.03)
        kill(running.pop(chance.randrange(len(running))))
        running.append(fork(lambda number=number: work(number + 3)))
    for child in running:
        kill(child)
    recorder = Recorder()
    store = DiskStore(root, strict=True, observer=recorder)
    for piece in {*kept.read_text().split(), *store.list_records("artifact")}:
        assert store.read_blob(store.read_record("artifact", piece)["blob"]) == content_of(piece)
    start_cold(store, log, PIECES)
    assert recorder.of(StoreWarning) == []


def test_owners_are_told_apart_by_place_number_and_start() -> None:
    me = current_owner()
    assert parse_owner(f"{me.as_name()}.abc") == me and not is_dead(me)
    assert is_dead(Owner(me.place, me.pid, me.started + 1))  # the number was given again
    assert not is_dead(Owner("elsewhere", 2**22 + 1, 1))
    child = fork(lambda: None)
    time.sleep(0.05)
    assert is_dead(Owner(me.place, child, 0)) or wait(child) == 0  # a zombie counts as dead
    assert parse_owner("group.one.record") is None and parse_owner("") is None
    assert digest_bytes(me.place.encode()) != digest_bytes(b"elsewhere")
