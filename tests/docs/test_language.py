"""The page "Replay for language models": its numbers are those of the committed runs, and right."""

import ast
import json
import re
import runpy
from math import exp, log
from statistics import fmean, stdev

import pytest

from tables.common import measured

from .blocks import ROOT

SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "language_numbers.py"))
PAGE = (ROOT / "docs" / "concepts" / "language-models.md").read_text("utf-8")


@pytest.fixture(scope="module")
def found():
    return SCRIPT["numbers"]()


def test_the_page_has_these_numbers(found):
    stored = json.loads((ROOT / "docs" / "pictures" / "language-models.json").read_text("utf-8"))
    assert json.loads(json.dumps(found)) == stored, "run `make pictures`"


def test_the_runs_are_whole():
    runs = SCRIPT["read"]("runs")
    full = {(method, buffer) for method in ("replay", "kl", "mse", "linf") for buffer in (0.5, 2.0, 5.0)}
    arms = {(False, *each) for each in full | {("plain", 0.0), ("joint", 0.0)}}
    arms |= {(True, *each) for each in full | {("plain", 0.0)}}
    told = {(*each, seed) for each in arms for seed in range(3)}
    assert sorted((run["lora"], run["method"], run["buffer"], run["seed"]) for run in runs) == sorted(told)
    for run in runs:
        assert [len(row) for row in run["perplexity"]] == [3] * 4
        assert all(1 < value < 5000 for row in run["perplexity"] for value in row)


def test_runs_of_one_seed_begin_with_the_same_weights():
    """Else the comparison by pairs would not be one."""
    begun = {(run["seed"], *run["perplexity"][0]) for run in SCRIPT["read"]("runs")}
    assert len(begun) == 3


def test_mean_spread_and_interval_by_hand(found):
    """Student's quantile for two degrees of freedom is 4.303 in printed tables."""
    runs = {
        (run["method"], run["seed"]): run["perplexity"][-1][0]
        for run in SCRIPT["read"]("runs")
        if run["buffer"] == 2.0 and not run["lora"]
    }
    values = [runs["mse", seed] for seed in range(3)]
    arm = found["arms"]["mse-2"]["numbers"]["code"]
    assert (arm["mean"], arm["sd"]) == pytest.approx((fmean(values), stdev(values)), rel=1e-4)
    logs = [log(runs["mse", seed] / runs["replay", seed]) for seed in range(3)]
    half = 4.303 * stdev(logs) / 3**0.5
    pair = found["pairs"]["mse-2"]["replay-2"]["code"]
    assert pair["ratio"] == pytest.approx(exp(fmean(logs)), rel=1e-4)
    assert pair["interval"] == pytest.approx([exp(fmean(logs) - half), exp(fmean(logs) + half)], rel=1e-3)


def test_the_default_weights_of_the_trainer_are_those_that_were_chosen(found):
    """Read from its source, as transformers may not be installed."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "language.py"))
    trials = [{"run": trial, "validation": trial["validation"]} for trial in SCRIPT["read"]("tuning")]
    chosen = script["chosen"](trials)
    source = (ROOT / "src" / "holdfast" / "integrations" / "transformers" / "arguments.py").read_text("utf-8")
    assert ast.literal_eval(re.search(r"^BETAS = (\{.*\})$", source, re.MULTILINE)[1]) == chosen
    assert found["settings"]["chosen"] == chosen
    assert {(name, run["beta"]) for name in chosen for run in SCRIPT["read"]("runs") if run["method"] == name} == {
        *chosen.items()
    }
    told = " ".join(source.partition("With `beta=None`")[2].partition('"""')[0].split())
    assert f'{chosen["kl"]:g} for "kl", {chosen["mse"]:g} for "mse" and "linf"' in told
    assert chosen["mse"] == chosen["linf"]
    tried = {name: [run["beta"] for run in SCRIPT["read"]("tuning") if run["method"] == name] for name in chosen}
    assert all(min(tried[name]) < beta < max(tried[name]) for name, beta in chosen.items()), "the page says so"


def test_what_the_page_says_is_so(found):
    """The sentences that would have to change with the numbers."""
    arms, pairs = found["arms"], found["pairs"]
    regularizers = ("kl", "mse", "linf")

    def end(name, domain):
        return arms[name]["numbers"][domain]["mean"]

    assert 0.4 < found["settings"]["stage_share"] < 0.45, "less than half of the samples"
    for size in ("0_5", "2", "5"):
        assert abs(end(f"replay-{size}", "numbers") / end("plain", "numbers") - 1) < 0.1
    for size in ("2", "5"):
        assert all(pairs[f"replay-{size}"]["plain"][domain]["clear"] == "lower" for domain in ("code", "prose"))
    assert 0.9 < pairs["replay-0_5"]["plain"]["code"]["ratio"] < 1, "hardly better"
    assert [pairs["replay-5"]["joint"][domain]["clear"] for domain in ("code", "prose")] == ["higher", "open"]
    tiny, small, large = (
        {name: pairs[f"{name}-{size}"][f"replay-{size}"] for name in regularizers} for size in ("0_5", "2", "5")
    )
    for each in (*tiny.values(), small["mse"], small["linf"]):
        assert each["code"]["clear"] == each["prose"]["clear"] == "lower"
    ratios = {name: each["code"]["ratio"] for name, each in tiny.items()}
    assert (min(ratios, key=ratios.get), max(ratios, key=ratios.get)) == ("kl", "mse")
    assert all(0.44 <= each["prose"]["ratio"] < 0.56 for each in tiny.values()), "about half"
    assert all(0.65 < each["code"]["ratio"] < 0.755 for each in small.values()), "a quarter to a third"
    assert all(0.82 < each["prose"]["ratio"] < 0.88 for each in small.values()), "about a seventh"
    assert all(each[domain]["lower"] == 3 for each in small.values() for domain in ("code", "prose"))
    assert (small["kl"]["code"]["clear"], small["kl"]["prose"]["clear"]) == ("lower", "open")
    for name in ("mse", "linf"):
        assert 0.93 < large[name]["code"]["ratio"] < 0.96, "a twentieth"
        assert {each["clear"] for each in large[name].values()} == {"open"}
    assert [large["kl"][domain]["clear"] for domain in ("code", "prose", "numbers")] == ["open", "higher", "higher"]
    assert all(each["kl"]["numbers"]["lower"] == 0 for each in (small, large))
    others = [each[name]["numbers"]["clear"] for each in (tiny, small, large) for name in ("mse", "linf")]
    assert set(others) == {"open"}
    for size in ("2", "5"):
        alone = arms[f"replay-{size}"]["code"]["code"]["values"]
        assert all(map(float.__gt__, arms[f"kl-{size}"]["code"]["code"]["values"], alone)), "higher too"
    tried = {run["beta"]: run["validation"] for run in SCRIPT["read"]("tuning") if run["method"] == "kl"}
    assert tried[5.0][0] > tried[50.0][0], "a smaller weight holds less"


def test_what_the_page_says_of_other_texts_is_so(found):
    before = found["earlier"]["pairs"]
    for size in ("0_5", "2"):
        for name in ("kl", "mse", "linf"):
            for pairs in (before, found["pairs"]):
                assert pairs[f"{name}-{size}"][f"replay-{size}"]["code"]["clear"] == "lower"
                assert pairs[f"{name}-{size}"][f"replay-{size}"]["prose"]["lower"] == 3
    for name in ("mse", "linf"):
        for domain in ("code", "prose"):
            each = before[f"{name}-5"]["replay-5"][domain]
            assert each["clear"] == "lower"
            assert 0.9 <= each["ratio"] < 0.94, "a tenth"
    assert found["earlier"]["data"] != found["settings"]["data"]


def test_what_the_page_says_of_lora_and_of_cost_is_so(found):
    arms, pairs = found["arms"], found["pairs"]
    for stage, domain in (("prose", "prose"), ("numbers", "numbers")):
        lora = [each[stage][domain]["mean"] for name, each in arms.items() if name.startswith("lora-")]
        assert min(lora) > 2.3 * arms["plain"][stage][domain]["mean"], "the adapter learns them worse"
    assert arms["lora-plain"]["numbers"]["code"]["mean"] > 1.5 * arms["lora-plain"]["code"]["code"]["mean"]
    assert arms["lora-plain"]["numbers"]["code"]["mean"] < arms["plain"]["numbers"]["code"]["mean"], "forgets less"
    for size in ("2", "5"):
        assert (
            arms[f"lora-replay-{size}"]["numbers"]["code"]["mean"]
            < 1.03 * arms[f"lora-replay-{size}"]["code"]["code"]["mean"]
        )
        kl, *others = (pairs[f"lora-{name}-{size}"][f"lora-replay-{size}"] for name in ("kl", "mse", "linf"))
        assert kl["all"]["clear"] == kl["numbers"]["clear"] == "higher"
        assert all(each[domain]["clear"] == "open" for each in others for domain in ("code", "prose", "all"))
        assert all(1.03 < each["numbers"]["ratio"] < 1.06 and each["numbers"]["lower"] == 0 for each in others)
    for name in ("kl", "mse", "linf"):
        pair = pairs[f"lora-{name}-0_5"]["lora-replay-0_5"]
        assert all(
            pair[domain]["clear"] == "lower" and 0.75 < pair[domain]["ratio"] < 0.83 for domain in ("code", "prose")
        )
    assert found["load"]["mse"]["ratio"] <= found["load"]["linf"]["ratio"] <= found["load"]["kl"]["ratio"]


@pytest.mark.parametrize("name", ["trainer-h200", "trainer-cpu"])
def test_the_trainer_costs_no_more_than_wanted(name):
    measured = json.loads((ROOT / "docs" / f"{name}.json").read_text("utf-8"))
    assert measured["sizes"]["vocabulary"] == 32768
    assert measured["steps"]["nothing"]["ratio"] <= 1.03
    assert max(each["ratio"] for each in measured["steps"].values()) <= 1.3


def test_numbers_of_the_page_come_from_the_file(found):
    """No perplexity and no ratio is typed: what is left are sizes of buffers, levels and the goals."""
    tables = r"<!-- (.*?):begin -->.*?<!-- \1:end -->"
    typed = re.sub(rf"{tables}|[\d.,]+<!-- .*? -->|\]\(.*?\)", "", PAGE, flags=re.DOTALL)
    assert PAGE.count("on one NVIDIA H200") == 2, "a name is no number, so it is typed"
    assert {found["settings"]["about"]["device"], measured("trainer-h200")["device"]} == {"NVIDIA H200"}
    allowed = {"0.5", "2", "5", "95", "1", "15", "1.03", "1.3"}
    assert set(re.findall(r"(?<![\w-])\d[\d.,]*\d|(?<![\w-])\d", typed)) <= allowed


def test_packing_gives_lines_that_can_be_read_again(tmp_path):
    import numpy as np

    (settings,), (first, *_) = SCRIPT["read"]("settings"), SCRIPT["read"]("runs")
    own = ("method", "buffer", "buffer_size", "beta", "seed", "lora")
    shared = {name: settings[name] for name in ("domains", "parameters", "about")}
    given = {name: settings[name] for name in ("steps", "batch", "lr")} | {name: first[name] for name in own}
    run = {name: value for name, value in first.items() if name not in own} | shared | {"run": given | {"name": "x"}}
    run["perplexity"] = [[1234.56789, 2.0, 3.0]]
    (tmp_path / "x-seed0.json").write_text(json.dumps(run))
    (tmp_path / "tuning.json").write_text(json.dumps({"chosen": {"kl": 5.0}, "trials": [run], "workers": 2}))
    (tmp_path / "speed.json").write_text(json.dumps({"alone": [{"method": "plain"}], "run": {"buffer": 2, "steps": 4}}))
    np.savez(tmp_path / "data.npz", about=json.dumps({"vocabulary": 7}))
    SCRIPT["pack"](tmp_path, tmp_path / "data.npz", tmp_path / "out")
    (packed,) = SCRIPT["read"]("runs", tmp_path / "out")
    assert packed == first | {"perplexity": [[1234.57, 2.0, 3.0]]}
    (common,) = SCRIPT["read"]("settings", tmp_path / "out")
    assert (common["data"], common["workers"], common["tuning"], common["steps"]) == (
        {"vocabulary": 7},
        2,
        {},
        settings["steps"],
    )
    other = run | {"about": {"torch": "another"}}
    (tmp_path / "x-seed1.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="differ in settings"):
        SCRIPT["pack"](tmp_path, tmp_path / "data.npz", tmp_path / "out")


def test_runs_can_be_added_to_those_that_are_there(tmp_path):
    """Missing ones are found by what they are; settings other than those of the others are refused."""
    (settings,), lines = SCRIPT["read"]("settings"), SCRIPT["read"]("runs")
    left, kept = lines[3], lines[:3] + lines[4:]
    for name, records in (("settings", [settings]), ("runs", kept)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    own = ("method", "buffer", "buffer_size", "beta", "seed", "lora")
    same = ("domains", "parameters", "about")
    given = {name: settings[name] for name in settings if name not in (*same, "data", "chosen", "workers", "tuning")}
    run = {name: value for name, value in left.items() if name not in own} | {name: settings[name] for name in same}
    run |= {"run": given | {name: left[name] for name in own} | {"name": "x"}}
    (tmp_path / "x-seed0.json").write_text(json.dumps(run))
    SCRIPT["add"](tmp_path, tmp_path)
    assert SCRIPT["read"]("runs", tmp_path) == lines
    (tmp_path / "x-seed0.json").write_text(json.dumps(run | {"about": {"torch": "another"}}))
    with pytest.raises(SystemExit, match="differ from those"):
        SCRIPT["add"](tmp_path, tmp_path)


def test_only_missing_runs_are_planned(tmp_path):
    from argparse import Namespace

    import numpy as np

    script = runpy.run_path(str(ROOT / "benchmarks" / "language.py"))
    (settings,), lines = SCRIPT["read"]("settings"), SCRIPT["read"]("runs")
    left = lines[3]
    for name, records in (("settings", [settings]), ("runs", lines[:3] + lines[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    np.savez(tmp_path / "data.npz", about=json.dumps(settings["data"]))
    sizes = dict.fromkeys(("batch", "length", "width", "layers", "heads"))
    options = Namespace(
        add_to=tmp_path, data=tmp_path / "data.npz", seeds=3, lora=False, buffers=(2.0, 0.5, 5.0), **sizes
    )
    (run,) = script["missing"](options).runs
    assert {name: getattr(run, name) for name in ("method", "buffer", "seed", "lora", "beta", "buffer_size")} == {
        name: left[name] for name in ("method", "buffer", "seed", "lora", "beta", "buffer_size")
    }
    np.savez(tmp_path / "data.npz", about=json.dumps({"vocabulary": 7}))
    with pytest.raises(SystemExit, match="domains are not those"):
        script["missing"](options)


def test_readers_of_results_pass_it_over():
    from holdfast.experiments import load_results

    found = load_results(ROOT / "results" / "language")
    assert len(found) == 0
    assert found.skipped == []
