"""The report page as text: what it says, that it is whole, and that it needs nothing else."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import piecework as pw
from e2e.command import llama_folder, piecework
from piecework.diagnostics.report.collect import collect
from piecework.diagnostics.report.compare import compare
from piecework.diagnostics.report.render import render, render_comparison
from piecework.diagnostics.run_file import read_run
from piecework.errors import OptionError
from piecework.values.shapes import Range
from piecework.values.view import verdicts_of
from report_runs import LARGEST, Missed, Page, missed_run


@pytest.fixture(scope="module")
def missed(tmp_path_factory: pytest.TempPathFactory) -> Missed:
    return missed_run(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(missed: Missed) -> Page:
    return Page(render(missed.view))


def longest_of(missed: Missed) -> str:
    spent: dict[str, int] = {}
    for event in missed.run.of("ArtifactCompiled"):
        name = " ".join(event["piece"].split()[:2])
        spent[name] = spent.get(name, 0) + event["end_ns"] - event["start_ns"]
    return max(spent, key=lambda name: spent[name])


def test_the_page_says_which_piece_took_longest(missed: Missed, page: Page) -> None:
    assert page.text["longest-piece"].startswith(f"Longest piece {longest_of(missed)} :")


def test_the_page_says_which_factor_caused_the_last_miss(page: Page) -> None:
    assert page.text["last-miss"].startswith("Last miss config.options.ranges nothing is stored under these factors")
    assert "config.options.ranges: `[[1, 64]]` / `[[1, 16], [17, 64]]`" in page.text["artifacts"]


def test_the_page_says_which_counts_have_no_captured_size(missed: Missed, page: Page) -> None:
    assert page.text["without-size-decode"].startswith("No captured size, decode 9-64")
    assert page.text["without-size-prefill"].startswith("No captured size, prefill 33-64")
    assert missed.view.without_size("decode") == (Range(9, LARGEST),)


def test_every_count_has_its_range_and_sizes(missed: Missed, page: Page) -> None:
    (program,) = missed.view.programs
    rows = [(str(one.counts), one.range, one.captured["decode"], one.captured["prefill"]) for one in program.served]
    assert rows == [
        ("1", "1", "size 1", "size 16"),
        ("2", "2-16", "size 2", "size 16"),
        ("3-4", "2-16", "size 4", "size 16"),
        ("5-8", "2-16", "size 8", "size 16"),
        ("9-16", "2-16", "", "size 16"),
        ("17-32", "17-64", "", "size 32"),
        ("33-64", "17-64", "", ""),
    ]
    assert "33-64 17-64 no captured size no captured size" in page.text["ranges"]


def test_the_parts_are_there(missed: Missed, page: Page) -> None:
    text = page.text
    assert "7 regions: 4 sites of 3 distinct pieces" in text["model"]
    assert "capture_toys::mix" in text["model"]
    assert "torch.nn.functional.linear" in text["piece-1"]
    assert "nothing was stored under its key" in text["artifacts"]
    assert "decode full 8 1" in text["capture"]
    assert "logical bytes of the traced graph: an explanatory model, not measured traffic" in text["traffic"]
    assert "Nothing was run beside its text" in text["verification"]
    assert {"trace", "dynamo", "compile", "capture"} <= set(text["startup"].split())


def test_failures_come_first_and_are_counted(missed: Missed) -> None:
    about = {"piece": "piece 1 (80707f39)", "range": "s0=2-16", "start_ns": 0, "end_ns": 0}
    events = [
        {"event": "Verified", "outcome": "held", "reason": "", **about},
        {"event": "VerificationFailed", "reason": "`v3` is off by 1.2e-02", **about},
        {"event": "Drift", "step": 40, "output": "logits", "error": 0.5},
    ]
    verdicts = verdicts_of(events)
    assert [one.outcome for one in verdicts] == ["failed", "drift", "held"]
    text = Page(render(replace(missed.view, verdicts=verdicts))).text
    assert text["faults"] == "Verification 2 failures 1 held, 0 untried"
    assert "piece 1 (80707f39) s0=2-16 failed `v3` is off by 1.2e-02" in text["verification"]


def test_the_page_is_whole_and_needs_nothing_else(page: Page) -> None:
    assert all(load.startswith("data:") for load in page.loads)
    assert all(link.startswith("#") for link in page.links)
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_what_a_run_says_of_itself_is_text(missed: Missed) -> None:
    html = render(missed.view)
    assert "<of three>" not in html
    assert "a toy &lt;of three&gt; layers" in html


MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
ODD = (MARKUP, None, -1, 1e308, [], {}, True, "", 10**30)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_that_was_changed_gives_a_page_of_text_or_is_refused(
    missed: Missed, tmp_path: Path, seed: int
) -> None:
    chance, document = random.Random(seed), json.loads(missed.file.read_text())
    refused = 0
    for number in range(40):
        changed = copy.deepcopy(document)
        entry = chance.choice([*changed["traceEvents"], changed["piecework"]])
        place = entry["args"] if "args" in entry and chance.random() < 0.6 else entry
        name = chance.choice(list(place))
        place[name] = chance.choice(ODD)
        if chance.random() < 0.3:
            del place[name]
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(changed))
        try:
            page = render(collect(read_run(file), pw.MemoryStore()))
        except OptionError as error:
            assert "is no run" in error.message
            refused += 1
        else:
            assert MARKUP not in page and Page(page).loads == ["data:,"]
    assert 0 < refused < 40


def test_markup_in_every_text_of_a_run_stays_text(missed: Missed, tmp_path: Path) -> None:
    document = json.loads(missed.file.read_text())
    for entry in document["traceEvents"]:
        for name, value in entry["args"].items():
            if isinstance(value, str) and name != "event" and value not in ("decode", "prefill"):
                entry["args"][name] = value + MARKUP
    for name in ("command", "started_at", "system"):
        document["piecework"][name] = [MARKUP] if name == "command" else MARKUP
    document["piecework"]["versions"] = {MARKUP: MARKUP}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(document))
    run = read_run(file)
    view = collect(run, pw.MemoryStore())
    for page in (render(view), render_comparison(compare(view, missed.view))):
        assert MARKUP not in page and "&lt;img src=x" in page
        assert Page(page).loads == ["data:,"]


def test_two_runs_side_by_side(missed: Missed) -> None:
    found = compare(missed.view, missed.view)
    assert found.factors == ()
    assert {pair.state for pair in found.pieces} == {"the same"}
    assert all(pair.change_s == 0 for pair in found.times)
    page = Page(render_comparison(found))
    assert "The programs' keys do not differ." in page.text["factors"]
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_the_command_reports_a_cold_and_a_warm_start_and_both(tmp_path: Path) -> None:
    model, store = llama_folder(tmp_path / "model"), tmp_path / "store"
    flags = ("--store", store, "--compiler", "eager", "--max-num-batched-tokens", "64")
    cold = piecework("report", model, "-o", tmp_path / "cold.html", *flags)
    assert (cold.code, cold.out.split(":")[0]) == (0, str(tmp_path / "cold.html"))
    warm = piecework("report", model, "-o", tmp_path / "warm.html", "--json", *flags)
    assert warm.document["misses"] == 0
    pages = {name: Page((tmp_path / f"{name}.html").read_text()) for name in ("cold", "warm")}
    assert "nothing is stored under these factors" in pages["cold"].text["last-miss"]
    assert pages["warm"].text["last-miss"].startswith("Last miss none: a stored program was found")
    assert "compiled" in pages["cold"].text["artifacts"] and "loaded" in pages["warm"].text["artifacts"]
    assert "7 regions: 4 sites of 3 distinct pieces" in pages["warm"].text["model"]
    for name in ("one", "two"):
        run = piecework("build", model, "--timeline", tmp_path / f"{name}.json", *flags)
        assert run.code == 0
        flags = (*flags[:-1], "32")
    both = piecework("report", tmp_path / "one.json", tmp_path / "two.json", "-o", tmp_path / "both.html", *flags)
    assert both.code == 0
    text = Page((tmp_path / "both.html").read_text()).text
    assert "config.options.max_num_batched_tokens: `64` / `32`" in text["factors"]
    assert "the same text" in text["pieces"]


def test_what_cannot_be_reported_is_told(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    done = piecework("report", other, "--store", "memory", "-o", tmp_path / "page.html")
    assert done.code == 2
    assert "is no run" in done.err
    assert not (tmp_path / "page.html").exists()
