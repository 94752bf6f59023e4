import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from holdfast.analysis import Robustness
from holdfast.analysis.findings import compare
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.report import analyze_alike, gather, render_report, write_figures, write_report
from holdfast.report.analyses import distinct
from holdfast.results import save

from .conftest import PAPER, make, paper_run, run, square

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, text and parents; raises where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "inside": [e["tag"] for e in self._open], **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.elements.append({"tag": tag, "text": "", "inside": [e["tag"] for e in self._open], **dict(attributes)})

    def handle_endtag(self, tag):
        assert self._open[-1]["tag"] == tag, (self._open[-1], tag)
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and wanted.items() <= e.items()]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for result in (*PAPER, run("er", 80.0), run("l2", 85.0), run("l2", 86.0, seed=1), run("joint", 95.0)):
        save(result, folder)
    return render_report(gather([folder]))


def analyzed(results):
    """A page with the analyses of the results that have logits."""
    found, refused = analyze_alike(results)
    return render_report(results, analyses=found, refused=refused)


def test_structure_and_accessibility(page):
    parsed = Page(page)
    (html,) = parsed.all("html")
    assert html["lang"] == "en"
    assert len(parsed.all("h1")) == len(parsed.all("title")) == len(parsed.all("main")) == 1
    assert parsed.all("a", class_="skip")[0]["href"] == "#main"
    ids = [element["id"] for element in parsed.elements if "id" in element]
    assert len(ids) == len(set(ids))
    for link in parsed.all("a"):
        assert link["href"].startswith(("#", "data:text/csv"))
        assert link["text"].strip()
        if link["href"].startswith("#"):
            assert link["href"][1:] in ids
    levels = [int(e["tag"][1]) for e in parsed.elements if re.fullmatch("h[1-6]", e["tag"])]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert parsed.all("svg")
    for svg in parsed.all("svg"):
        assert svg["role"] == "img"
        assert len(svg["aria-label"]) > 20
    for table in parsed.all("table"):
        assert "section" in table["inside"]
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    for heading in parsed.all("th", scope="col"):
        assert heading["text"].strip()
    assert len(parsed.all("button", type="button")) == len(parsed.all("th", scope="col")) + 1


def test_nothing_comes_from_elsewhere(page):
    assert not re.search(r"https?:|//[a-z]", page.replace("http-equiv", ""))
    assert "@import" not in page
    for element in Page(page).elements:
        assert "src" not in element
        assert element["tag"] not in ("link", "iframe", "object", "embed", "img")


def test_the_numbers_are_there(page):
    parsed = Page(page)
    text = " ".join(parsed.all("main")[0]["text"].split())
    assert "52.00 ± 1.00 (3)" in text
    assert "51.76 ± 2.19" in [cell["text"] for cell in parsed.all("td", class_="published")]
    (differs,) = parsed.all("td", class_="differs")
    assert "80.00 ± 1.00 (3)" in differs["text"]
    assert "✗" in differs["text"]
    assert "differs from the paper" in differs["text"]
    assert float(differs["data-value"]) == 80.0
    assert "Accuracy over tasks: toy, buffer 200" in text
    assert "85.50 ± 0.71 (2)" in text
    tiles = {d["text"].strip() for d in parsed.all("dd") if "section" in d["inside"]}
    assert any(tile.startswith("1 of 4 compared") for tile in tiles)


def test_claims_come_with_their_numbers(page):
    (claim,) = [item for item in Page(page).all("li") if item.get("class") in ("supported", "partly", "refuted")]
    assert "holds in 2 of 2" in claim["text"]
    assert "l2 62.00, er 52.00" in claim["text"]


def test_every_run_tells_how_it_came_about(page):
    text = " ".join(Page(page).all("section", id="runs")[0]["text"].split())
    for result in PAPER:
        assert result.config.fingerprint in text
    assert "holdfast 0.1.0, commit 0123456789abcdef, torch 2.13.0, python 3.11.7, device x86_64" in text
    assert "The same for all: benchmark mnist-360, model mlp" in text
    assert "replay size" in text


def test_downloads_hold_the_numbers(page):
    from urllib.parse import unquote

    downloads = {a["download"]: unquote(a["href"].partition(",")[2]) for a in Page(page).all("a") if "download" in a}
    assert downloads["runs.csv"].count("\n") == 1 + len(PAPER) + 4
    assert "table1,buffer 200,er,mnist-360,accuracy,52,1,3,51.76" in downloads["cells.csv"]
    assert "er,3,80," in downloads["figure-accuracy-over-tasks-toy-buffer-200.csv"]


def test_what_comes_from_files_is_text(stored):
    nasty = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"
    result = run(nasty, 80.0, benchmark=nasty, model=nasty)
    result.environment.update(device=nasty, torch=nasty)
    text = render_report(stored(result))
    result.environment.update(device="x86_64", torch="2.13.0")
    parsed = Page(text)
    assert len(parsed.all("script")) == 1
    assert not parsed.all("img")
    assert "<script>alert" not in text
    assert nasty in parsed.all("section", id="runs")[0]["text"]
    assert not any(name.startswith("on") for element in parsed.elements for name in element)


def test_only_the_pages_own_script_may_run(page):
    from base64 import b64encode
    from hashlib import sha256

    (policy,) = [meta["content"] for meta in Page(page).all("meta") if "http-equiv" in meta]
    (script,) = Page(page).all("script")
    digest = b64encode(sha256(script["text"].encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_same_results_give_the_same_page(stored):
    results = stored(*PAPER, run("er", 80.0), run("l2", 85.0))
    assert render_report(results) == render_report(results)


def test_nothing_is_drawn_of_one_or_two_numbers_and_nothing_twice(page):
    parsed = Page(page)
    titles = [figure["text"].partition(". ")[0].strip() for figure in parsed.all("figcaption")]
    assert "Ours minus published: table1, buffer 200" in titles  # er, l2, mse
    assert not any("no buffer" in title for title in titles)  # sgd alone
    assert len(titles) == len(set(titles))
    assert "no result yet" not in parsed.all("main")[0]["text"]
    rows = [row["text"] for row in parsed.all("th", scope="row")]
    assert "linf" not in rows
    assert "No results yet for joint, l1, linf" in parsed.all("section", id="experiment-table1")[0]["text"]


def test_a_single_run_is_enough(stored):
    parsed = Page(render_report(stored(run("er", 80.0))))
    assert "1 result on toy" in parsed.all("header")[0]["text"]
    assert not parsed.all("section", id="claims")
    assert parsed.all("section", id="other")


def test_one_experiment_alone(stored):
    text = render_report(stored(*PAPER), experiment="table1")
    parsed = Page(text)
    assert parsed.all("h1")[0]["text"] == "Holdfast: table1"
    assert parsed.all("section", id="experiment-table1")


def test_damaged_and_foreign_files_are_named_and_skipped(stored, tmp_path):
    stored(*PAPER)
    folder = tmp_path / "results"
    (folder / "notes.json").write_text('{"shopping": "milk"}')
    (folder / "cut.json").write_text('{"config": {')
    other = json.loads(next(folder.glob("*/result.json")).read_text())
    (folder / "old.json").write_text(json.dumps({**other, "protocol": 0}))
    for name, other_shape in (("task_il_matrix", [[1.0] * 99]), ("untrained", [1.0] * 99), ("accuracy_matrix", [])):
        (folder / f"{name}.json").write_text(json.dumps({**other, name: other_shape}))
    odd = make(run("er").config, square(80.0))
    odd.matrix.mul_(3)
    save(odd, folder)
    results = gather([folder])
    assert len(results) == len(PAPER)
    assert len(results.skipped) == 7
    text = " ".join(Page(render_report(results)).all("section", id="skipped")[0]["text"].split())
    for reason in (
        "notes.json: not a result",
        "cut.json: damaged",
        "old.json: of protocol 0",
        "task_il_matrix.json: damaged: its matrices are not of one shape",
        "untrained.json: damaged: its matrices are not of one shape",
        "accuracy_matrix.json: damaged: accuracy_matrix is no table",
        "accuracy_matrix holds numbers that are no percentages",
    ):
        assert reason in text


def test_damaged_logits_cost_nothing_but_the_analyses_of_one_run(stored, tmp_path):
    good, bad = (paper_run("er", 55.0, seed, 500, "seq-cifar10") for seed in (0, 1))
    stored(good, bad)
    (tmp_path / "results" / bad.config.fingerprint / "logits.safetensors").write_bytes(b"rubbish")
    text = render_report(gather([tmp_path / "results"]))
    assert "logits.safetensors is not readable" in text
    assert "2 results on seq-cifar10" in text


def test_analyses_on_request_from_the_logits_there_are(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for method, final in (("er", 70.0), ("l2", 80.0)):
        result = run(method, final, tasks=2)
        for task in range(2):
            result.logits[f"logits.{task}"] = 4 * torch.randn(50, 4, generator=generator)
            result.logits[f"labels.{task}"] = torch.arange(50) % 2 + 2 * task
        save(result, tmp_path)
    save(run("mse", 85.0, tasks=2), tmp_path)
    damaged = run("kl", 60.0, tasks=2)
    save(damaged, tmp_path)
    (tmp_path / damaged.config.fingerprint / "logits.safetensors").write_bytes(b"rubbish")
    assert "analyses-toy" not in render_report(gather([tmp_path]))
    parsed = Page(analyzed(gather([tmp_path])))
    (section,) = parsed.all("section", id="analyses-toy-buffer-200")
    assert "reliability" in section["text"]
    assert "logits.safetensors is not readable" in parsed.all("section", id="skipped")[0]["text"]


def with_logits(*configs):
    """Runs of five tasks with random answers."""
    generator = torch.Generator().manual_seed(0)
    for config in configs:
        result = make(config, square(60.0, 5))
        result = replace(result, task_matrix=result.matrix + 1)  # tasks have classes of their own
        for task in range(5):
            result.logits[f"logits.{task}"] = torch.randn(20, 10, generator=generator)
            result.logits[f"labels.{task}"] = torch.arange(20) % 2 + 2 * task
        yield result


ER, L2, L1 = (RunConfig.preset("seq-cifar10", method, buffer_size=200) for method in ("er", "l2", "l1"))


def test_analyses_compare_exactly_the_runs_of_the_table(tmp_path):
    """Like with like: the settings of the table, and the same seeds of each method."""
    for result in with_logits(ER, ER.change(seed=1), ER.change(seed=2), L2, L2.change(seed=1), L1.change(beta=7.0)):
        save(result, tmp_path)
    results = gather([tmp_path])
    (found,), refused = analyze_alike(results)
    assert [(one.label, one.seeds) for one in found.summaries] == [("er", (0, 1)), ("l2", (0, 1))]
    assert refused == []
    parsed = Page(analyzed(results))
    (section,) = parsed.all("section", id="analyses-seq-cifar10-buffer-200")
    assert "seeds 0, 1 of each method" in section["text"]
    (trust,) = parsed.all("section", id="trust")
    assert trust["text"].count("(2)") == 4  # ECE and recency gap of er and l2; the table above has er with three seeds
    assert "l1" not in trust["text"]


def test_methods_without_a_common_seed_are_not_compared(tmp_path):
    for result in with_logits(ER, L2.change(seed=1)):
        save(result, tmp_path)
    parsed = Page(analyzed(gather([tmp_path])))
    assert not parsed.all("section", id="analyses-seq-cifar10-buffer-200")
    text = " ".join(parsed.all("section", id="trust")[0]["text"].split())
    assert "seq-cifar10, buffer 200 is not analyzed: its methods have no seed in common." in text
    assert "ECE (%) is not compared, as no seed is there of all methods." in text


def test_a_stored_analysis_of_unlike_runs_is_refused_with_a_sentence(stored, tmp_path):
    """The page used to compare er of two seeds with l1 of another weight and another seed."""
    folder = tmp_path / "runs"
    for result in with_logits(ER, ER.change(seed=1), L1.change(beta=7.0), L2):
        save(result, folder)
    results = gather([folder])
    unlike = compare(one.analysis for one in results)
    alike = compare(one.analysis for one in results if one.config in (ER, L2))
    parsed = Page(render_report(results, analyses=unlike))
    assert not parsed.all("section", id="analyses-seq-cifar10-buffer-200")
    text = " ".join(parsed.all("section", id="trust")[0]["text"].split())
    assert (
        "l1 has other settings than in the tables, and its methods have different seeds (er: 0, 1; l1, l2: 0)" in text
    )
    assert Page(render_report(results, analyses=alike)).all("section", id="analyses-seq-cifar10-buffer-200")


def test_an_analysis_of_the_same_runs_is_shown_once_unless_it_has_the_robustness(tmp_path):
    """A stored one, made by `holdfast analyze`, was shown below the one that the report had made."""
    for result in with_logits(ER, L2):
        save(result, tmp_path)
    results = gather([tmp_path])
    (live,) = (found,) = compare(one.analysis for one in results)
    hurt = Robustness("generated", (1,), 50.0, {"fog": [40.0]}, {"fog": 40.0}, {"weather": 40.0}, None)
    robust = replace(live, summaries=tuple(replace(one, robustness=hurt) for one in live.summaries))
    for analyses, shown in (([live, found], [live]), ([live, robust], [robust]), ([robust, found], [robust])):
        assert distinct(analyses) == shown
    fewer = replace(live, summaries=live.summaries[:1])
    assert distinct([live, fewer]) == [live, fewer]
    text = render_report(results, analyses=[live, found])
    assert len([each for each in Page(text).all("section") if each["id"].startswith("analyses-")]) == 1


def test_results_without_logits_in_single_files_count(stored, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for result in PAPER:
        (kept / f"{result.config.fingerprint}.json").write_text(json.dumps(result.to_json()))
    assert render_report(gather([kept])) == render_report(gather([kept, kept]))
    assert len(gather([kept])) == len(PAPER)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        gather([tmp_path / "nowhere"])


def test_the_page_is_written_whole(stored, tmp_path):
    path = write_report(render_report(stored(*PAPER)), tmp_path / "deep" / "report.html")
    assert path.read_text().endswith("</html>\n") or path.read_text().endswith("</html>")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_size < 500_000


def test_figures_are_written_with_their_numbers(stored, tmp_path):
    written = write_figures(stored(run("er", 80.0), run("l2", 85.0)), tmp_path / "figures")
    assert [path.name for path in written] == [
        "final-accuracy-toy-buffer-200.png",
        "accuracy-over-tasks-toy-buffer-200.png",
        "accuracy-matrices-toy-buffer-200.png",
    ]
    assert all(path.with_suffix(suffix).exists() for path in written for suffix in (".svg", ".csv", ".json"))


def test_a_full_page_leaves_figures_out_and_says_so(stored, monkeypatch):
    from holdfast.report import page

    monkeypatch.setattr(page, "FIGURES_BUDGET", 1_000)
    parsed = Page(render_report(stored(run("er", 80.0), run("l2", 85.0))))
    assert len(parsed.all("svg")) == 1
    assert "1 more figures are left out" in parsed.all("section", id="other")[0]["text"]


def test_runs_outside_the_paper_are_folded_where_there_are_others(page, stored):
    def folded(text):
        (start,) = re.findall(r'<section id="other".*?</section>', text, re.DOTALL)
        return "comparisons</summary>" in start

    assert folded(page)
    assert not folded(render_report(stored(run("er", 80.0), run("l2", 85.0))))


def test_numbers_that_another_table_shows_are_not_shown_again(stored):
    runs = [
        make(RunConfig.preset("seq-cifar10", method, buffer_size=500), square(final, 5))
        for method, final in (("er", 63.0), ("l2", 73.0), ("mse", 74.0))
    ]
    parsed = Page(render_report(stored(*runs)))
    (first,) = parsed.all("section", id="experiment-table1")
    (again,) = parsed.all("section", id="experiment-task-performance")
    assert "73.00" in first["text"]
    assert "73.00" not in again["text"]
    assert "Its numbers stand in table1 above." in again["text"]
    assert "Accuracy matrices" in again["text"]


def test_methods_without_any_number_have_no_row(stored):
    runs = [paper_run(method, 60.0, 0, 500, "seq-cifar10") for method in ("er", "l2")]
    for each in runs:
        each.logits["logits.0"] = torch.eye(10)
        each.logits["labels.0"] = torch.arange(10)
    parsed = Page(render_report(stored(*runs)))
    (section,) = parsed.all("section", id="experiment-calibration")
    assert "ECE" in section["text"]
    assert "no result yet" not in section["text"]


@pytest.mark.slow
def test_a_thousand_results_are_quick_and_small(tmp_path):
    import time

    from holdfast.experiments import EXPERIMENTS

    configs = list(dict.fromkeys(c for e in EXPERIMENTS.values() for c in e.configs(range(5))))[:1000]
    for number, config in enumerate(configs):
        tasks = config.tasks or 5
        save(make(config, square(40 + number % 50, 1 if config.method == "joint" else tasks)), tmp_path / "many")
    begin = time.perf_counter()
    path = write_report(render_report(gather([tmp_path / "many"])), tmp_path / "report.html")
    assert time.perf_counter() - begin < 20
    assert path.stat().st_size < 5_000_000
