"""The page "Replay for language models": its numbers are those of the committed runs, and right."""

import ast
import json
import re
import runpy
from math import exp, log
from statistics import fmean, stdev

import pytest

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
    arms |= {(True, method, buffer) for method, buffer in full if buffer == 2.0} | {(True, "plain", 0.0)}
    assert {(run["lora"], run["method"], run["buffer"]) for run in runs} == arms
    assert len(runs) == 3 * len(arms) == 57
    assert {run["seed"] for run in runs} == {0, 1, 2}
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
    source = (ROOT / "src" / "holdfast" / "integrations" / "transformers.py").read_text("utf-8")
    assert ast.literal_eval(re.search(r"^BETAS = (\{.*\})$", source, re.MULTILINE)[1]) == chosen
    assert found["settings"]["chosen"] == chosen
    assert {(name, run["beta"]) for name in chosen for run in SCRIPT["read"]("runs") if run["method"] == name} == {
        *chosen.items()
    }
    told = " ".join(source.partition("With `beta=None`")[2].partition('"""')[0].split())
    assert f'{chosen["kl"]:g} for "kl", {chosen["mse"]:g} for "mse" and "linf"' in told
    assert chosen["mse"] == chosen["linf"]
    assert chosen["kl"] == max(trial["beta"] for trial in SCRIPT["read"]("tuning")), "the page says so"


def test_what_the_page_says_is_so(found):
    """The sentences that would have to change with the numbers."""
    arms, pairs = found["arms"], found["pairs"]
    regularizers = ("kl", "mse", "linf")

    def end(name, domain):
        return arms[name]["numbers"][domain]["mean"]

    for size in ("0_5", "2", "5"):
        assert end(f"replay-{size}", "numbers") <= end("plain", "numbers")
        assert end(f"replay-{size}", "code") < end("plain", "code")
    tiny = {name: pairs[f"{name}-0_5"]["replay-0_5"] for name in regularizers}
    assert all(each[domain]["clear"] == "lower" for each in tiny.values() for domain in ("code", "prose"))
    assert all(0.62 < each["prose"]["ratio"] < 0.71 for each in tiny.values()), "about two thirds"
    ratios = [tiny[name]["code"]["ratio"] for name in regularizers]
    assert (min(ratios), max(ratios)) == (ratios[0], ratios[-1]), "from kl to linf"
    assert [tiny[name]["all"]["clear"] for name in regularizers] == ["lower", "open", "lower"]
    assert tiny["mse"]["all"]["lower"] == 3
    small = {name: pairs[f"{name}-2"]["replay-2"] for name in regularizers}
    assert all(each["code"]["clear"] == "lower" and 0.83 < each["code"]["ratio"] < 0.87 for each in small.values())
    assert all(each["prose"]["clear"] == "open" and each["prose"]["lower"] == 3 for each in small.values())
    assert all(each["numbers"]["clear"] == "open" for each in small.values())
    assert small["kl"]["numbers"]["lower"] == 0
    large = {name: pairs[f"{name}-5"]["replay-5"] for name in regularizers}
    clear = {(name, domain) for name, each in large.items() for domain, pair in each.items() if pair["clear"] != "open"}
    assert clear == {("linf", "code")}
    assert 0.93 < large["linf"]["code"]["ratio"] < 1
    assert large["kl"]["code"]["lower"] == large["kl"]["prose"]["lower"] == 0
    assert all(pairs["replay-5"]["joint"][domain]["clear"] == "higher" for domain in ("code", "prose"))
    for size in ("0_5", "2", "5"):
        after = {name: arms[f"{name}-{size}"]["code"]["code"] for name in ("replay", *regularizers)}
        alone = after.pop("replay")
        assert all(ours > theirs for ours, theirs in zip(after["kl"]["values"], alone["values"], strict=True))
        assert all(0.95 < after[name]["mean"] / alone["mean"] < 1.03 for name in ("mse", "linf"))
    assert found["clear"]["higher"] == 1, "is clearly higher"


def test_what_the_page_says_of_lora_and_of_cost_is_so(found):
    arms, pairs, speed, overhead = (found[name] for name in ("arms", "pairs", "speed", "overhead"))
    for stage, domain in (("prose", "prose"), ("numbers", "numbers")):
        lora = [each[stage][domain]["mean"] for name, each in arms.items() if name.startswith("lora-")]
        assert min(lora) > 2.5 * arms["plain"][stage][domain]["mean"], "the new domains are not learned"
    assert arms["lora-plain"]["numbers"]["code"]["mean"] > 1.5 * arms["lora-plain"]["code"]["code"]["mean"]
    assert arms["lora-replay-2"]["numbers"]["code"]["mean"] < 1.02 * arms["lora-replay-2"]["code"]["code"]["mean"]
    for name in ("kl", "mse", "linf"):
        clear = {domain: pair["clear"] for domain, pair in pairs[f"lora-{name}-2"]["lora-replay-2"].items()}
        assert "lower" not in clear.values()
        assert (clear["code"] == "higher") == (name == "kl")
    assert speed["linf"]["seconds_per_step"] < speed["plain"]["seconds_per_step"]
    assert max(each["seconds_per_step_ratio"] for each in speed.values()) < 1.1
    assert found["load"]["mse"]["ratio"] <= found["load"]["linf"]["ratio"] <= found["load"]["kl"]["ratio"]
    assert overhead["nothing"]["ratio"] > 1.03, "the page says that this was not reached"
    assert overhead["fixed"]["ratio"] > 1.3


def test_what_the_page_says_of_the_trainer_on_a_cpu_is_so(found):
    now = json.loads((ROOT / "docs" / "trainer-cpu.json").read_text("utf-8"))
    assert now["sizes"]["vocabulary"] == found["overhead"]["Trainer"]["sizes"]["vocabulary"]
    assert now["steps"]["nothing"]["ratio"] <= 1.03
    assert max(now["steps"][kind]["ratio"] for kind in ("quarter", "fixed", "later")) <= 1.3


def test_numbers_of_the_page_come_from_the_file():
    """No perplexity and no ratio is typed: what is left are sizes of buffers, levels and the goals."""
    typed = re.sub(r"\{\{.*?\}\}|\]\(.*?\)", "", PAGE, flags=re.DOTALL)
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
    SCRIPT["pack"](tmp_path, None, tmp_path / "data.npz", tmp_path / "out")
    (packed,) = SCRIPT["read"]("runs", tmp_path / "out")
    assert packed == first | {"perplexity": [[1234.57, 2.0, 3.0]]}
    (common,) = SCRIPT["read"]("settings", tmp_path / "out")
    assert (common["data"], common["workers"], common["tuning"], common["steps"]) == ({"vocabulary": 7}, 2, {}, 50)
    other = run | {"about": {"torch": "another"}}
    (tmp_path / "x-seed1.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="differ in settings"):
        SCRIPT["pack"](tmp_path, None, tmp_path / "data.npz", tmp_path / "out")


def test_readers_of_results_pass_it_over():
    from holdfast.experiments import load_results

    found = load_results(ROOT / "results" / "language")
    assert len(found) == 0
    assert found.skipped == []
