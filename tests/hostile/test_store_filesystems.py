"""Real filesystems that refuse: full, read-only, and mounted so that nothing on them runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import json, sys
from pathlib import Path
from piecework.errors import PieceworkError
from piecework.events import Recorder, StoreWarning
from piecework.store.disk import DiskStore
folder, recorder = Path(sys.argv[1]), Recorder()
store = DiskStore(folder / "store", observer=recorder)
"""


def run_on(folder: Path, options: str, code: str, prepare: str = "true") -> Any:
    """Mount a small filesystem over `folder` in a namespace of its own, run `code` there, and return what it prints."""
    folder.mkdir()
    script = f'mount -t tmpfs -o {options} none "$0" && {prepare} && exec "$1" -c "$2" "$0"'
    source = HEAD + textwrap.dedent(code)
    command = ["unshare", "-m", "sh", "-c", script, str(folder), sys.executable, source]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting needs a namespace of one's own")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "mount:" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_on_a_noexec_filesystem_is_named_with_a_hint(tmp_path: Path) -> None:
    code = """
    digest = store.write_blob(b"kernel")
    try:
        store.kernel_path(digest)
    except PieceworkError as error:
        print(json.dumps([error.message, error.hint, store.read_blob(digest).decode()]))
    """
    message, hint, data = run_on(tmp_path / "disk", "noexec,mode=700", code)
    assert message.endswith("cannot be loaded: its filesystem is mounted `noexec`") and data == "kernel"
    assert hint.startswith("put the store on a filesystem that allows running code")


def test_a_full_filesystem_keeps_what_fitted_and_the_rest_runs_from_memory(tmp_path: Path) -> None:
    code = """
    blobs = [bytes([number]) * 40_000 for number in range(20)]
    digests = [store.write_blob(blob) for blob in blobs]
    for number, digest in enumerate(digests):
        store.write_record("artifact", f"a{number}", {"blob": digest})
    store.write_record("program", "g.p", {"artifacts": digests})
    assert [store.read_blob(store.read_record("artifact", f"a{n}")["blob"]) for n in range(20)] == blobs
    later = DiskStore(folder / "store", strict=True)
    kept = [later.read_record("artifact", key)["blob"] for key in later.list_records("artifact")]
    assert all(later.read_blob(digest) in blobs for digest in kept)
    reasons = [warning.reason for warning in recorder.of(StoreWarning)]
    print(json.dumps([len(kept), later.list_records("program"), reasons, store.kept_in_memory > 20]))
    """
    kept, programs, reasons, in_memory = run_on(tmp_path / "disk", "size=512k,mode=700", code)
    assert 1 <= kept < 20 and programs == [] and in_memory
    assert reasons == ["it takes no writes (No space left on device); what is not stored runs from memory"]


def test_a_read_only_filesystem_serves_and_takes_nothing(tmp_path: Path) -> None:
    code = """
    digest = store.write_blob(b"new")
    store.write_record("program", "g.new", {"blob": digest})
    with store.single_flight("work") as flight:
        pass
    try:
        store.check_writable()
    except PieceworkError as error:
        reason = error.message
    old = store.read_record("program", "g.old")
    print(json.dumps([store.read_blob(old["blob"]).decode(), store.list_records("program", "g"), flight.owned, reason,
                      [warning.reason for warning in recorder.of(StoreWarning)]]))
    """
    fill = (
        'PYTHONDONTWRITEBYTECODE=1 "$1" -c "from piecework.store.disk import DiskStore; import sys; '
        "s = DiskStore(sys.argv[1] + '/store'); s.write_record('program', 'g.old', {'blob': s.write_blob(b'old')})"
        '" "$0" && mount -o remount,ro "$0"'
    )
    old, keys, owned, reason, warnings = run_on(tmp_path / "disk", "mode=700", code, fill)
    assert old == "old" and keys == ["g.new", "g.old"] and owned
    assert reason.endswith("takes no writes: Read-only file system")
    assert warnings == ["it takes no writes (Read-only file system); what is not stored runs from memory"]
