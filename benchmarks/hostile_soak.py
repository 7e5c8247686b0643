"""Does a store stay right under 2,000 damages and 200 kills? The hostile suite in full, and what it did.

    .venv/bin/python benchmarks/hostile_soak.py

Runs what `make test-soak` runs of `tests/hostile`; `--xml FILE` takes what such a run wrote with `--junitxml` instead.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

from measure import write_result

HERE = pathlib.Path(__file__).resolve().parent
CAVEATS = (
    "Seeded: the same damages each time. What is counted stands in the tests, and a test passes or fails as a whole.",
    "Seconds are of one core of a shared machine and say nothing of the store: most are spent making stores.",
)
COUNTS = {  # by what the tests' names begin with
    "test_damaged_stores": "2,000 stores, one to four damages of 15 kinds each",
    "test_every_cut_and_every_flip": "a record and a blob cut at each length, a bit flipped in each byte",
    "test_entries_that_change": "2,000 reads of an entry that another thread damages",
    "test_random_kills": "200 processes killed with SIGKILL at random moments",
    "test_a_damaged_archive": "600 damaged archives",
}  # fmt: skip


def main() -> None:
    """Run the suite, or read what a run wrote, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xml", type=pathlib.Path, help="what a run wrote with --junitxml")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "hostile_soak.json")
    arguments = parser.parse_args()
    if arguments.xml is not None:
        body = read_results(arguments.xml)
    else:
        with tempfile.TemporaryDirectory() as folder:
            xml = pathlib.Path(folder) / "soak.xml"
            words = [sys.executable, "-m", "pytest", "-n", "0", "-m", "soak and not gpu", f"--junitxml={xml}"]
            subprocess.run([*words, "tests/hostile"], cwd=HERE.parent, check=False)
            body = read_results(xml)
    write_result(
        arguments.output,
        question="Does a store stay right under damage and kills, in full counts",
        caveats=CAVEATS,
        body=body,
    )
    if body["failed"]:
        raise SystemExit("a test failed: the result says which")


def read_results(xml: pathlib.Path) -> dict[str, object]:
    """Return how each test of a run ended, with what it counts."""
    tests = []
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        name = case.get("name", "").partition("[")[0]
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
        what = next((count for begin, count in COUNTS.items() if name.startswith(begin)), "")
        tests.append({"test": name, "outcome": outcome, "what": what, "seconds": round(float(case.get("time", 0)), 1)})
    counts = {each: sum(test["outcome"] == each for test in tests) for each in ("passed", "failed", "skipped")}
    return {**counts, "tests": tests}


if __name__ == "__main__":
    main()
