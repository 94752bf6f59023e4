"""The site: it builds without a warning, says everything, and loads nothing from elsewhere."""

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest

import holdfast
from holdfast import analysis
from hooks import without_links_outside
from make_numbers import number
from report.browser import Browser, chromium

from .blocks import ROOT, command_options


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """What a page loads by itself, where it links to, its anchors, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads, self.links, self.anchors, self.words = [], [], set(), []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.add(values.get("id"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values["href"])
        for name in ("src", "srcset", "poster", "data"):
            if values.get(name):
                self.loads.append(values[name])

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site, pages):
    """No fonts, scripts, pictures or styles of other sites: reading it offline works, and nobody is told."""
    assert len(pages) > 20
    for path, page in pages.items():
        for address in page.loads:
            assert not re.match(r"(?:[a-z]+:)?//", address), f"{path.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text("utf-8")), style
    assert not list(site.rglob("*.py")), "scripts are no part of the site"


def test_scripts_fetch_nothing_from_elsewhere(site):
    """Material's script knows addresses for what is not used here: diagrams, and the stars of a repository."""
    unused = ("mermaid", "iframe-worker", "resize-observer-polyfill")  # the last is for browsers from before 2020
    known = (*(f"https://unpkg.com/{name}" for name in unused), "https://api.github.com/", "https://${e}/api/v4")
    for script in site.rglob("*.js"):
        for address in re.findall(r"""["'`](https?://[^"'`\s]+)""", script.read_text("utf-8")):
            assert address.startswith(known) or "w3.org" in address, f"{script.name}: {address}"
    for path in site.rglob("*.html"):
        assert 'class="mermaid"' not in path.read_text("utf-8")


def test_every_link_inside_leads_somewhere(site, pages):
    for path, page in pages.items():
        for address in page.links:
            target, _, anchor = unquote(address).partition("#")
            if re.match(r"[a-z]+:", target) or path.name == "404.html":
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.exists(), f"{path.name} links to {address}"
            if anchor and there in pages:
                assert anchor in pages[there].anchors, f"{path.name} links to {address}"


def test_pages_lead_to_the_next_and_the_one_before(site, pages):
    shown = (site / "start.html").read_text("utf-8")
    assert re.search(r'<a href="index.html" class="md-footer__link md-footer__link--prev"', shown)
    assert re.search(r'<a href="coming-from.html" class="md-footer__link md-footer__link--next"', shown)


@pytest.mark.skipif(chromium() is None, reason="needs Chromium and its driver")
def test_it_works_from_its_folder(site, tmp_path):
    """Opened from the file system: search finds, nothing is wider than the window, nothing is complained about."""
    with Browser(tmp_path) as browser:
        browser.open(site / "index.html", "?q=reservoir")  # types this into the search
        assert browser.until("return document.querySelectorAll('.md-search-result__item').length > 5", True)
        cut = "return [...document.querySelectorAll('pre code')].some(each => each.scrollWidth > each.clientWidth)"
        browser.open(site / "concepts" / "method.html")
        assert browser.run(cut) is False, "the formula is cut"
        browser.resize(390, 800)
        browser.open(site / "index.html")
        assert browser.until("return document.querySelector('picture img').currentSrc.endsWith('demo-phone.png')", True)
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert browser.errors() == []


def text_of(pages, name):
    return next("".join(page.words) for path, page in pages.items() if path.name == name)


def test_the_reference_has_everything_public(pages):
    shown = " ".join(text_of(pages, name) for name in ("learning.html", "laboratory.html", "analysis.html"))
    constants = {"BENCHMARK_CORRUPTIONS", "CATEGORIES", "CORRUPTIONS", "EXTRA_CORRUPTIONS", "SEVERITIES", "analysis"}
    for name in {*holdfast.__all__, *analysis.__all__} - constants:
        assert re.search(rf"\b{name}\b", shown), name
    shown = text_of(pages, "friends.html")
    # Read, as not all of them can be imported here.
    for module in ("estimators/__init__", "loggers", "integrations/lightning", "integrations/transformers/__init__"):
        source = (ROOT / "src" / "holdfast" / f"{module}.py").read_text("utf-8")
        for name in ast.literal_eval(re.search(r"__all__ = (\[.*?\])", source, re.DOTALL)[1]):
            assert re.search(rf"\b{name}\b", shown), name


def test_the_command_line_has_every_command_and_option(pages):
    shown = text_of(pages, "cli.html")
    for command, options in command_options().items():
        part = shown.partition(f"holdfast {command}¶")[2].partition("¶")[0]
        assert part, command
        for option in options:
            assert not option.startswith("--") or option in part, f"{command} {option}"


def test_numbers_come_from_the_files_behind_the_pictures(pages):
    told = json.loads((ROOT / "docs" / "speed.json").read_text("utf-8"))
    for name in ("speed", "comparison"):
        assert f"{told['gpu_authors']} steps" in text_of(pages, f"{name}.html")
        assert f"{told['gpu_together']:.0f}" in text_of(pages, f"{name}.html")
    assert number("trust.er.ece") in text_of(pages, "trust.html")


def test_the_agreement_is_as_computed(pages):
    shown = " ".join(text_of(pages, "how-sure.html").split())
    measures = json.loads((ROOT / "docs" / "pictures" / "how-sure.json").read_text("utf-8"))["measures"]
    assert len(measures) == 5
    for each in measures.values():
        assert f"{each['holdfast']['mean']:.2f} ± {each['holdfast']['sd']:.2f} {each['second']['mean']:.2f}" in shown
        assert f"{each['welch_p']:.3f}; {each['mann_whitney_p']:.3f}" in shown


def test_the_tables_of_language_models_are_as_computed(pages):
    path = next(path for path in pages if path.parts[-2:] == ("concepts", "language-models.html"))
    shown = " ".join("".join(pages[path].words).split())
    found = json.loads((ROOT / "docs" / "pictures" / "language-models.json").read_text("utf-8"))
    for arm in found["arms"].values():
        last = (f"{each['mean']:,.0f} ± {each['sd']:,.0f}" for each in arm["numbers"].values())
        assert " ".join(last) in shown
    for each in (each for others in found["pairs"].values() for each in others.get("replay-2", {}).values()):
        assert f"{each['ratio']:.2f} ({each['interval'][0]:.2f} to {each['interval'][1]:.2f})" in shown
    measured = json.loads((ROOT / "docs" / "trainer-h200.json").read_text("utf-8"))
    for each in measured["steps"].values():
        assert f"{1000 * each['seconds']:.1f} ms {each['ratio']:.2f} {each['least_ratio']:.2f}" in shown
    assert found["speed"].keys() == found["load"].keys()


def test_findings_come_from_the_analysis(pages):
    from holdfast.analysis.findings import read_findings

    shown = text_of(pages, "trust.html")
    (found,) = read_findings(ROOT / "results" / "seq-cifar10" / "analysis" / "analysis.json")
    assert all(claim.holds for claim in found.claims), "the page says that they hold"
    assert all(claim.detail in shown for claim in found.claims)
    assert [len(each.seeds) for each in found.summaries] == [2, *[1] * 6], "the page says so"
    for each in found.summaries:
        assert re.search(rf"{each.label}\s+{len(each.seeds)}\s+{each.accuracy.mean:.1f}\s+{each.ece.mean:.1f}\s", shown)
    assert {each.robustness.source for each in found.summaries} == {"generated"}, "the page says so"
    (more,) = read_findings(ROOT / "results" / "seq-cifar10" / "analysis" / "buffer-500" / "analysis.json")
    assert len(more.claims) == 2
    assert all(claim.holds for claim in more.claims), "the page says that they hold"
    assert all(claim.detail in shown for claim in more.claims)
    assert {each.seeds for each in more.summaries} == {(2,)}, "the page says so"
    assert len(more.summaries) == 5
    own, others = read_findings(
        ROOT / "results" / "seq-cifar10" / "analysis" / "buffer-500-corrupted" / "analysis.json"
    )
    assert [(each.label, len(each.seeds)) for each in own.summaries] == [("ballast", 2)]
    assert [(each.label, len(each.seeds)) for each in others.summaries][-1] == ("ballast", 1)
    assert len(others.summaries) == 7
    (er,) = (each for each in found.summaries if each.label == "er")
    for each in (*own.summaries, *others.summaries):
        assert each.ece.mean < er.ece.mean
        assert each.recency_gap.mean < er.recency_gap.mean
        assert each.mra.mean > er.mra.mean
        assert f"{each.accuracy.mean:.1f} {each.ece.mean:.1f}" in " ".join(shown.split())
    robust = sorted(others.summaries, key=lambda each: each.mra.mean)
    assert (robust[0].label, robust[-1].label) == ("kl", "l1"), "the page says so"


def test_comments_of_the_pages_are_no_part_of_the_site(site):
    comments = re.compile(r"<!--.*?-->", re.DOTALL)
    pages = [path for path in (ROOT / "docs").rglob("*.md") if comments.search(path.read_text("utf-8"))]
    assert len(pages) > 20
    for path in pages:
        page = site / path.relative_to(ROOT / "docs").with_suffix(".html")
        assert not comments.findall(page.read_text("utf-8")), path


def test_the_overhead_is_as_measured(pages):
    measured = (ROOT / "docs" / "bench-observe.txt").read_text("utf-8").split()
    shown = text_of(pages, "speed.html").split()
    assert len(measured) > 20
    assert [word for word in measured if re.fullmatch(r"1\.\d{3}", word)], "ratios"
    assert all(word in shown for word in measured if re.fullmatch(r"\d\.\d{3}", word))


def test_the_rates_of_the_gpu_are_as_measured(pages):
    def measured(name):
        return json.loads((ROOT / "docs" / name).read_text("utf-8"))["device_rates"]

    shown = " ".join(text_of(pages, "speed.html").split())
    complete = measured("bench-h200.json")
    assert len(complete) == 20, "five rows of four sizes"
    for first, second in pairwise(complete):
        pair = " ".join(f"{each['steps_per_second']:,.0f}" for each in (first, second))
        assert first["runs"] > second["runs"] or pair in shown
    start = json.loads((ROOT / "docs" / "bench-h200-start.json").read_text("utf-8"))
    for row, key in (("together", "seconds"), ("without imports", "without_imports")):
        assert " ".join([row, *(f"{start[kind][key]:.1f} s" for kind in ("cold", "warm", "other"))]) in shown
    assert start["cold"]["without_imports"] > 10, "the page says that the aims were not reached"
    assert start["warm"]["without_imports"] > 3
    for line in (ROOT / "docs" / "bench-h200-turns.jsonl").read_text("utf-8").splitlines():
        each = json.loads(line)
        assert each["what"] != "turns" or f"{each['steps_per_second']:.0f}" in shown


def test_before_and_after_were_measured_on_one_machine(pages):
    """The sentences of the page that would have to change with the numbers."""
    found = {}
    for name in ("bench-h200-before.json", "bench-h200.json"):
        for each in json.loads((ROOT / "docs" / name).read_text("utf-8"))["device_rates"]:
            found.setdefault((each["benchmark"], each["method"], each["runs"]), []).append(each)
    shown = " ".join(text_of(pages, "speed.html").split())
    ratios = {}
    for case, (before, after) in found.items():
        old, new = before["steps_per_second"], after["steps_per_second"]
        ratios[case] = new / old
        assert f"{old:,.0f} to {new:,.0f}, {new / old:.2f}" in shown
    for method in ("er", "mse"):
        assert 1.035 < ratios["seq-cifar10", method, 4] < 1.05, "four per cent"
        assert 0.995 < ratios["seq-cifar10", method, 1] < 1.025, "two or nothing"
    assert 1.14 < ratios["rot-mnist", "mse", 8] < 1.2, "a sixth"
    before, after = found["seq-cifar10", "er", 1]
    assert after["ready_seconds"] < before["ready_seconds"] / 2
    processes = json.loads((ROOT / "docs" / "bench-h200-processes.json").read_text("utf-8"))["steps_per_second"]
    assert 1.055 < processes["2x2"][0] / processes["1x4"][0] < 1.07
    best = found["seq-cifar10", "mse", 4][1]["steps_per_second"]
    assert max(rate for rates in processes.values() for rate in rates) < best
    assert all(max(rates) <= max(processes["2x2"]) for rates in processes.values())


def test_the_two_arithmetics_are_as_run():
    page = (ROOT / "docs" / "speed.md").read_text("utf-8")
    for name in ("er-200-seed0", "er-200-seed0-float32"):
        run = json.loads((ROOT / "results" / "seq-cifar10" / f"{name}.json").read_text("utf-8"))
        assert f"{name}.json) | {run['accuracy']:.2f} | {run['task_il_accuracy']:.2f} |" in page


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](../results/x)", "a"),
        ("[a](bench-cpu.json)", "[a](bench-cpu.json)"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("[a](#there)", "[a](#there)"),
        ("![a](../other.png)", "![a](../other.png)"),
    ],
)
def test_links_out_of_the_site_become_text(written, shown):
    assert without_links_outside(written, ROOT / "docs" / "page.md") == shown
