"""The page "Past the field": its tables are those of the committed runs, and its sentences are so."""

import json
from math import sqrt
from statistics import fmean, stdev

import pytest
from scipy import stats

from holdfast.config import RunConfig
from holdfast.experiments import EXPERIMENTS, assess
from holdfast.regularizers import REGULARIZERS
from holdfast.report import gather
from tables.beyond import GROWTH, candidates, lag, last_rows, regularizers, turning

from .blocks import ROOT

PAGE = (ROOT / "docs" / "concepts" / "beyond.md").read_text("utf-8")


def read(name):
    return [json.loads(line) for line in (ROOT / "results" / "beyond" / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def runs():
    return {(row["network"], row["epochs"], row["candidate"]): row for row in read("candidates.jsonl")}


def test_the_runs_are_whole(runs):
    for row in runs.values():
        assert row["validation"] == 0.1
        for accuracy, tasks in zip(row["accuracies"], row["last"], strict=True):
            assert accuracy == pytest.approx(fmean(tasks), abs=0.01)
    shares = {(row["share"], row["idea"]) for row in read("lag.jsonl")}
    assert len(read("lag.jsonl")) == 3 * len(shares) == 45


KINDS = {("resnet18", 5): 1, ("resnet18", 20): 1, ("narrow", 1): 1, ("narrow", 3): 1, ("mlp", 10): 3}
"""Runs of each candidate, by network and epochs."""


def test_the_tables_have_every_run(runs):
    assert {key[:2] for key in runs} == set(KINDS)
    for network, epochs in KINDS:
        assert f"<!-- candidates {network} {epochs}:begin -->" in PAGE
        table = candidates(network, str(epochs))
        shown = [row for key, row in runs.items() if key[:2] == (network, epochs)]
        assert len(table.splitlines()) == 2 + len(shown)
        for row in shown:
            told = f"{fmean(row['accuracies']):.1f}" if row["accuracies"] else "the loss became infinite"
            assert f"| {row['candidate']} | {len(row['accuracies'])} | {told}" in table
    assert "<!-- lag:begin -->" in PAGE
    first = [row["accuracy"] for row in read("lag.jsonl") if (row["share"], row["idea"]) == (0.7, "")]
    assert f"| 0.7 | {fmean(first):.1f} ± " in lag()


def test_what_the_page_says_is_so(runs):
    (failed,) = (key for key, row in runs.items() if not row["accuracies"])
    assert "held strongly by a slow teacher" in failed[2]
    assert "not finite" in runs[failed]["failed"].replace("no longer finite", "not finite")
    done = {key: row for key, row in runs.items() if key != failed}
    assert all(len(row["accuracies"]) == KINDS[key[:2]] for key, row in done.items())
    of = {key: row["accuracies"][0] for key, row in done.items()}
    last = {key: row["last"][0][-1] for key, row in done.items()}
    for kind in (("resnet18", 5), ("narrow", 1)):
        assert last[*kind, "plain"] == max(value for key, value in last.items() if key[:2] == kind)
    narrow = {name: value for (*kind, name), value in of.items() if kind == ["narrow", 1]}
    assert max(narrow, key=narrow.get) == "average as target, adjusted, fast"
    wide = {name: value for (*kind, name), value in of.items() if kind == ["resnet18", 5]}
    for other in ("", ", asymmetric"):
        assert wide[f"average as target{other}, cutmix"] < wide[f"average as target{other}"]
    best = "average for evaluation only, adjusted, very fast"
    assert (round(wide["average for evaluation only"]), round(wide["average for evaluation only, very fast"])) == (
        59,
        63,
    )
    fast = sorted(value for name, value in wide.items() if "very fast" in name)
    slow = max(value for name, value in wide.items() if "very fast" not in name)
    assert sum(value < slow for value in fast) == 1, "except one"
    for more in ("draws of 64", "balanced", "beta 0.5", "hold", "jitter", "jitter of all", "held by a slow teacher"):
        assert wide[f"{best}, {more}"] < wide[best]
    for more in ("hold", "jitter"):
        assert wide[f"average as target, adjusted, very fast, {more}"] < wide["average as target, adjusted, very fast"]
    ahead = {
        idea: wide[f"average for evaluation only, {idea}, very fast"] - wide[f"average as target, {idea}, very fast"]
        for idea in ("adjusted", "asymmetric")
    }
    assert 4 < ahead["adjusted"] < 5, "better by four points"
    assert -2.5 < ahead["asymmetric"] < -1.5, "worse by two"


def test_what_the_page_says_of_longer_runs_is_so(runs):
    base = "average for evaluation only, adjusted, very fast"
    twice, thrice = (base.replace("adjusted", f"adjusted {times}") for times in ("twice", "thrice"))

    def over(epochs):
        """By how much the last task is over the others."""
        *others, newest = runs["resnet18", epochs, base]["last"][0]
        return newest - fmean(others)

    assert (round(over(5)), round(over(20))) == (18, 32)
    long = {name: row for (*kind, name), row in runs.items() if kind == ["resnet18", 20]}
    accuracy = {name: row["accuracies"][0] for name, row in long.items()}
    for stronger in (twice, thrice):
        assert 2 < accuracy[stronger] - accuracy[base] < 2.5, "two points"
        *others, newest = (a - b for a, b in zip(long[stronger]["last"][0], long[base]["last"][0], strict=True))
        assert newest < 0
        assert all(each > -1.1 for each in others)
    for idea in ("jitter of all", "features held by a slow teacher"):
        assert 1 < accuracy[f"{thrice}, {idea}"] - accuracy[thrice] < 1.6, "one point more"
    held = f"{thrice}, features held by a slow teacher"
    both = f"{thrice}, jitter of all, features held by a slow teacher"
    assert 2.5 < accuracy[held] - accuracy[both] < 3.5, "three points"
    lost = [a - b for a, b in zip(long[held]["last"][0], long[both]["last"][0], strict=True)]
    assert sorted(lost)[-2:] == lost[-2:], "on the two newest tasks most of all"
    assert 2 < accuracy[f"{both}, rate 0.1"] - accuracy[both] < 2.5, "two points"
    assert 0.5 < accuracy[f"{both}, weight decay"] - accuracy[both] < 1.5, "one"
    for slower in (thrice, held):
        assert 0.9 < accuracy[slower] - accuracy[f"{slower}, rate 0.1"] < 2, "costs a point or more"
    for little in ("weight decay", "three times as strongly"):
        assert 0 < accuracy[f"{held}, {little}"] - accuracy[held] < 0.5
    straight = {name: row for name, row in long.items() if "turned" not in name}
    assert max(straight, key=accuracy.get) == f"{held}, weight decay"
    assert round(max(accuracy[name] for name in straight)) == 71
    with_features = {name for name in straight if "features held" in name}
    assert len(with_features) == 9
    assert set(sorted(straight, key=lambda name: -long[name]["task_il"][0])[:8]) < with_features
    assert 6 < accuracy[base] - accuracy[f"{base}, jitter"] < 6.5, "by six points"
    assert 0 < runs["resnet18", 5, twice]["accuracies"][0] - runs["resnet18", 5, base]["accuracies"][0] < 1

    assert [round(runs["narrow", 3, name]["accuracies"][0]) for name in (base, thrice)] == [51, 45]

    digits = {name: fmean(row["accuracies"]) for (*kind, name), row in runs.items() if kind == ["mlp", 10]}
    four, six, ten = (base.replace("adjusted", f"adjusted {times} times") for times in ("four", "six", "ten"))
    assert max(digits, key=digits.get) == four
    assert 6.5 < digits[four] - digits[base] < 7.5
    assert digits[ten] < digits[base] < digits[six] < digits[thrice]
    plain = base.replace("adjusted, ", "")
    nearest = {name: digits[f"{name}, nearest mean"] - digits[name] for name in (plain, base, thrice)}
    assert 0.5 < nearest[base] < nearest[plain] < 2, "one or two points"
    assert -3.5 < nearest[thrice] < -2.5, "loses three"
    both = digits[thrice.replace("thrice", "thrice, asymmetric")]
    assert both < min(digits[thrice], digits["average as target, asymmetric, very fast"])


def test_what_the_page_says_of_turned_images_is_so(runs):
    thrice = "average for evaluation only, adjusted thrice, very fast"
    gains = []
    for name, told in (
        (f"{thrice}, features held by a slow teacher, weight decay", "71.3 to 76.6"),
        (thrice, "69.5 to 74.5"),
    ):
        straight, turned = (runs["resnet18", 20, each] for each in (name, f"{name}, turned"))
        before, after = straight["accuracies"][0], turned["accuracies"][0]
        assert f"{before:.1f} to {after:.1f}" == told
        assert told in PAGE
        gains.append([b - a for a, b in zip(straight["last"][0], turned["last"][0], strict=True)])
    assert round(max(max(each[:-1]) for each in gains)) == 14, "up to fourteen points"
    assert all(fmean(each[:-1]) > each[-1] for each in gains), "the old tasks gain most"
    assert [round(each[-1]) for each in gains] == [-1, 3]
    best = max((row["accuracies"][0], name) for (*kind, name), row in runs.items() if kind == ["resnet18", 20])
    assert best[1].endswith("turned")

    assert "<!-- few:begin -->" in PAGE
    few = {row["candidate"]: row["accuracies"] for row in read("few.jsonl")}
    once = "average for evaluation only, adjusted, very fast"
    assert all(len(values) == 2 for values in few.values())
    kept = f"{thrice}, features held by a slow teacher, weight decay, turned"

    def gain(name, how):
        return [b - a for a, b in zip(few[name], few[f"{name}, {how}"], strict=True)]

    sides = [each for name in (f"{thrice}, turned", kept) for each in gain(name, "seen at all angles")]
    assert all(2.9 < each < 5 for each in sides), "three to five points in all four pairs"
    one, other = sorted(gain(f"{once}, turned", "seen at all angles"))
    assert one < 0 < other, "one pair gains and the other loses"
    assert [round(2 * each) / 2 for each in sorted(gain(kept, "seen mirrored as well"))] == [0.5, 2.0]
    for name in (once, thrice, f"{once}, jitter of all"):
        gained = [b - a for a, b in zip(few[name], few[f"{name}, turned"], strict=True)]
        assert all(2 < each < 6.5 for each in gained), "with each seed, by two to six points"
    strengths = [fmean(few[f"{once}, turned{how}"]) for how in ("", ", half as strongly", ", twice as strongly")]
    assert max(strengths) - min(strengths) < 0.5, "hardly matters"
    assert fmean(few[f"{once}, jitter of all, turned"]) < strengths[0]
    assert fmean(few[thrice]) < fmean(few[once]), "too much adjustment hurts here"
    assert round(abs(few["plain"][0] - few["plain"][1])) == 19


def test_what_the_page_says_of_regularizers_is_so(runs):
    rows = {
        (row["settings"].get("regularizer", "mse"), row["settings"]["beta"]): row for row in read("regularizers.jsonl")
    }
    assert "<!-- regularizers:begin -->" in PAGE
    names, betas = ({key[place] for key in rows} for place in (0, 1))
    assert names == set(REGULARIZERS)
    assert len(rows) == len(names) * len(betas) == 55
    best = {}
    for name in names:
        first = {beta: rows[name, beta]["accuracies"][0] for beta in betas}
        chosen = max(first, key=first.get)
        assert [beta for beta in betas if len(rows[name, beta]["accuracies"]) == 3] == [chosen]
        best[name] = (fmean(rows[name, chosen]["accuracies"]), chosen)
        assert f"| {name} | " in regularizers()
    norms, directions = {"l1", "l2", "linf", "mse"}, {"dino", "simclr", "simsiam", "byol", "barlow"}
    assert all(round(best[name][0]) == 91 for name in norms)
    weights = [best[name][1] for name in norms]
    assert max(weights) / min(weights) == 16
    thrice = "average for evaluation only, adjusted thrice, very fast"
    digits = {name: fmean(row["accuracies"]) for (*kind, name), row in runs.items() if kind == ["mlp", 10]}
    without = digits[f"{thrice}, beta 0"]
    assert round(without, 1) == 87.0
    assert all(0.5 < best[name][0] - without < 2.1 for name in directions), "one or two points"
    assert all(best[name][0] < without for name in ("kl", "mi")), "gain nothing"
    for how in ("refreshed slowly", "refreshed", "refreshed at once"):
        assert abs(digits[f"{thrice}, {how}"] - digits[thrice]) < 0.2
    for idea, values in (("anchored", ("0.0001", "0.001", "0.01")), ("gradients up to", ("3", "1", "0.3"))):
        gains = [digits[f"{thrice}, {idea} {value}"] - digits[thrice] for value in values]
        assert all(gain < 0.1 for gain in gains)
        assert abs(gains[0]) < 0.1, "gentle enough not to hurt"


def test_what_the_page_says_of_statistics_is_so():
    own, estimated = read("statistics.jsonl")
    assert estimated["candidate"] == f"{own['candidate']}, statistics of the buffer"
    for row, told in ((estimated, "51.8 ± 2.7"), (own, "52.0 ± 1.9")):
        assert f"{fmean(row['accuracies']):.1f} ± {stdev(row['accuracies']):.1f}" == told
        assert told in PAGE
        assert (row["network"], row["epochs"], len(row["seeds"])) == ("narrow", 3, 2)


def test_what_the_page_says_of_full_length_is_so():
    accuracy = {
        (method, size): fmean(fmean(row) for row in last_rows(method, size))
        for method in ("mse", "er", "linf", "ballast")
        for size in (200, 500)
    }
    assert max((accuracy[key], key) for key in accuracy if key[1] == 200)[1] == ("ballast", 200)
    field = EXPERIMENTS["field"].select(["benchmark=seq-cifar10", "metric=accuracy"])
    published = {
        size: max(cell.published.mean for cell in field.cells if cell.published and cell.config.buffer_size == size)
        for size in (200, 500)
    }
    ours = {size: [fmean(row) for row in last_rows("ballast", size)] for size in (200, 500)}
    for size in (200, 500):
        assert accuracy["ballast", size] > published[size]
        assert len(ours[size]) == 3
    assert "**`ballast` has {:.1f} and {:.1f}**".format(*map(fmean, ours.values())) in PAGE
    newer = {200: (72.70, 73.38), 500: (79.42, 80.64)}
    assert all(f"{each:.1f}" in PAGE for both in newer.values() for each in both)
    assert max(newer[200]) < fmean(ours[200]), "more than both with 200"
    assert min(newer[500]) < fmean(ours[500]) < max(newer[500]), "between them with 500"
    for size, others in newer.items():
        low, high = stats.t.interval(0.95, 2, fmean(ours[size]), stdev(ours[size]) / sqrt(3))
        assert all(low < each < high for each in others), "may be chance"

    assert "<!-- growth:begin -->" in PAGE
    sets = list(GROWTH.values())
    for size in (200, 500):
        rows = [last_rows("ballast", size, each) for each in sets]
        *_, before, after = ([fmean(row) for row in each] for each in rows)
        gained = [b - a for a, b in zip(before, after, strict=True)]
        assert round(fmean(gained)) == 3, "three points with both buffers"
        assert min(gained) > 0, "each of six pairs"
    for size in (200, 500):
        mine, theirs = (
            [fmean(column) for column in zip(*last_rows(method, size), strict=True)] for method in ("ballast", "mse")
        )
        assert 0 < mine[-1] - fmean(mine[:-1]) < theirs[-1] - fmean(theirs[:-1]), "prefers the newest, less than mse"
    assert "<!-- full:begin -->" in PAGE
    assert "<!-- tasks:begin -->" in PAGE


def test_what_the_page_says_of_turning_digits_is_so():
    found = gather([ROOT / "results"])

    def over_the_next(benchmark, size):
        chosen = [f"benchmark={benchmark}", f"buffer_size={size}", "metric=accuracy"]
        verdicts = assess(EXPERIMENTS["field"].select(chosen), found).verdicts
        assert all(each.n == 10 for each in verdicts)
        (first, best), (second, next_best), *_ = sorted(((each.mean, each.cell.row) for each in verdicts), reverse=True)
        assert (best, next_best) == ("ballast", "clser")
        return first - second

    assert over_the_next("mnist-360", 200) == pytest.approx(1, abs=0.1), "by a point"
    for place in (("mnist-360", 500), ("rot-mnist", 200), ("rot-mnist", 500)):
        assert 0 < over_the_next(*place) < 0.51, "half a point or less"

    rows = {(row["idea"], row["buffer_size"]): row for row in read("mnist-360.jsonl")}
    assert all(row["seeds"] == [100, 101, 102, 103] for row in rows.values())
    mean = {key: fmean(row["accuracies"]) for key, row in rows.items()}
    for size in (200, 500):
        target, stored = mean["average as target", size], mean["average for evaluation only", size]
        assert 2.5 < mean["average as target, adjusted", size] - target < 4.5, "three to four points"
        assert stored > target
        assert 2.5 < target - mean["average as target, decay 0.999", size] < 5, "three to five points"
        assert mean["average for evaluation only, adjusted", size] > mean["average as target, adjusted", size]
        assert target - mean["average as target, asymmetric", size] > 2, "two points or more"
    assert "<!-- turning:begin -->" in PAGE
    assert all(turning().count(f"| {idea} |") == 1 for idea, _ in rows)

    preset = RunConfig.preset("mnist-360", "ballast", buffer_size=200, seed=100)
    chosen = rows["average for evaluation only, adjusted", 200]
    assert preset.fingerprint == chosen["fingerprints"][0], "the method has the settings of this row"
    assert mean["average for evaluation only, adjusted", 200] == max(mean[key] for key in mean if key[1] == 200)
    assert sorted(mean[key] for key in mean if key[1] == 500)[-2] == mean["average for evaluation only, adjusted", 500]


def test_a_fairer_network_needs_a_faster_average():
    """The best share of a task falls from neither idea to adjusted to asymmetric."""
    rows, best = read("lag.jsonl"), []
    for idea in ("", "adjusted=True", "asymmetric=True"):
        mean = {
            share: fmean(row["accuracy"] for row in rows if (row["share"], row["idea"]) == (share, idea))
            for share in {row["share"] for row in rows}
        }
        best.append(max(mean, key=mean.get))
    assert best[0] > best[1] > best[2]


def test_readers_of_results_pass_it_over():
    from holdfast.experiments import load_results

    found = load_results(ROOT / "results" / "beyond")
    assert len(found) == 0
    assert found.skipped == []


def test_many_classes_need_strength_or_longer_counting_and_not_both():
    rows, tried = read("hundred.jsonl"), {}
    for row in rows:
        assert row["images"] == 5 * 9_000
        assert row["train_limit"] == 1_000
        assert row["accuracy"] == pytest.approx(fmean(row["last"]), abs=0.01)
        settings = row["settings"]
        name = (
            "asymmetric" if settings.get("asymmetric") else (settings.get("strength", 1.0), settings.get("recall", 0.0))
        )
        tried.setdefault(name if settings["decay"] == 0.975 else settings["decay"], []).append(row)
        assert settings["turn"] == 1.0
        assert settings["hold_features"] == 5.0
    assert len({row["fingerprint"] for row in rows}) == len(rows)
    slower, faster = tried.pop(0.9875), tried.pop(0.95)
    assert set(tried) == {"asymmetric", (1.0, 0.0), (3.0, 0.0), (6.0, 0.0), (1.0, 0.9), (3.0, 0.9)}
    usual = fmean(row["accuracy"] for row in tried[3.0, 0.0])
    assert all(abs(row["accuracy"] - usual) < 0.5 for row in (*slower, *faster)), "hardly matters"
    assert tried[6.0, 0.0][0]["accuracy"] < usual - 2, "too much"
    for seed in {row["seed"] for row in rows}:
        mean = {name: row["accuracy"] for name, runs in tried.items() for row in runs if row["seed"] == seed}
        for better in {(3.0, 0.0), (1.0, 0.9)} & set(mean):
            for worse in {(1.0, 0.0), (3.0, 0.9), "asymmetric"} & set(mean):
                assert mean[better] > mean[worse], (seed, better, worse)
        assert mean.get("asymmetric", 0.0) <= min(mean.values()) or "asymmetric" not in mean
    last = {name: fmean(row["last"][-1] for row in runs) for name, runs in tried.items()}
    assert sorted(last, key=last.get)[:2] == [(3.0, 0.9), "asymmetric"], "the last task is the worst of all"
    assert max(last[(3.0, 0.9)], last["asymmetric"]) < last[(3.0, 0.0)] / 3
