"""Are models that are, or nearly are, what a pass looks for right under Inductor, however they are cut?

    .venv/bin/python -m benchmarks.fusion_soak

Runs what `make test-soak` runs of the fusion cases and the sixteen architectures; `--xml FILE …` takes what such runs
wrote with `--junitxml` instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter
from xml.etree import ElementTree

from benchmarks.measure import REPOSITORY, write_result

CAVEATS = (
    "Each case is a model of a few calls: it is judged against float64 at four sizes, with its memory and strides.",
    "An architecture is a random model of three layers: logits of one prompt, cut before and inside what is compiled.",
    "Seconds are of one core of a shared machine; most are spent in the C++ compiler.",
)
FILES = ("tests/null/test_fusions.py", "tests/inductor/test_partition_inductor.py")

CHOSEN = ("-m", "(slow or soak) and not gpu", "-k", "inductor- or architecture")


def main() -> None:
    """Run the cases, or read what runs wrote, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xml", type=pathlib.Path, nargs="+", help="what runs wrote with --junitxml")
    parser.add_argument("--output", type=pathlib.Path, default=REPOSITORY / "benchmarks/results/fusion_soak.json")
    arguments = parser.parse_args()
    if arguments.xml:
        body = read_results(arguments.xml)
    else:
        with tempfile.TemporaryDirectory() as folder:
            xml = pathlib.Path(folder) / "soak.xml"
            words = [sys.executable, "-m", "pytest", "-n", "0", f"--junitxml={xml}", *CHOSEN]
            subprocess.run([*words, *FILES], cwd=REPOSITORY, check=False)
            body = read_results([xml])
    question = "Are models that are, or nearly are, what a pass looks for right under Inductor, however they are cut"
    write_result(arguments.output, question=question, caveats=CAVEATS, body=body)
    if body["failed"]:
        raise SystemExit("a test failed: the result says which")


def read_results(files: list[pathlib.Path]) -> dict[str, object]:
    """Return how many cases of each way held, and each that did not."""
    ways: dict[str, Counter[str]] = {}
    failed, seconds = [], 0.0
    for case in (case for file in files for case in ElementTree.parse(file).getroot().iter("testcase")):
        name = case.get("name", "")
        is_architecture = "architecture" in name
        way = "architectures" if is_architecture else name[name.index("[") + 1 : -1].rpartition("inductor-")[2]
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        ways.setdefault(way, Counter())[outcome] += 1
        failed += [name] if bad else []
        seconds += float(case.get("time", 0))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    ended = {way: dict(counts) for way, counts in ways.items()}
    return {"versions": versions, "failed": len(failed), "names": failed, "ways": ended, "seconds": round(seconds)}


if __name__ == "__main__":
    main()
