"""Runs over their seeds, methods against methods: means, gains, the paper's claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast import results
from holdfast.analysis import Estimate, calibration, transfer
from holdfast.analysis.findings import Findings, summarize
from holdfast.analysis.runs import RunAnalysis, analyze_run
from holdfast.config import RunConfig
from holdfast.errors import UsageError
from holdfast.results import RunResult

from .test_runs import stored


def test_a_summary_is_the_mean_over_seeds(tmp_path: Path) -> None:
    runs = [analyze_run(stored(tmp_path, seed=seed)) for seed in (0, 1, 2)]
    summary = summarize("er", runs)
    assert summary.seeds == (0, 1, 2)
    eces = [one.calibration.ece for one in runs if one.calibration]
    assert summary.ece is not None
    assert summary.ece.mean == pytest.approx(sum(eces) / 3)
    assert summary.ece.low is not None
    assert min(eces) <= summary.ece.low <= summary.ece.mean
    expected = transfer([one.result.matrix.tolist() for one in runs], [one.result.untrained.tolist() for one in runs])
    assert summary.transfer == expected
    assert summary.recency is not None
    assert summary.recency.task_probabilities[1] == pytest.approx(
        sum(one.recency.task_probabilities[1] for one in runs if one.recency) / 3
    )


def test_pooled_bins_are_those_of_all_predictions(tmp_path: Path) -> None:
    folders = [stored(tmp_path, seed=seed) for seed in (0, 1)]
    parts = [results.read_tensors(folder, results.LOGITS) for folder in folders]
    logits, labels = (torch.cat([p[f"{kind}.{t}"] for p in parts for t in (0, 1)]) for kind in ("logits", "labels"))
    pooled = summarize("er", [analyze_run(folder) for folder in folders]).calibration
    direct = calibration(logits, labels)
    assert pooled is not None
    assert pooled.count == direct.count
    assert pooled.accuracy == pytest.approx(direct.accuracy)
    assert pooled.confidence == pytest.approx(direct.confidence)
    assert (pooled.ece, pooled.mce) == pytest.approx((direct.ece, direct.mce))


def test_only_seeds_of_one_config_are_summed_up(tmp_path: Path) -> None:
    runs = [analyze_run(stored(tmp_path)), analyze_run(stored(tmp_path, seed=1, lr=0.5))]
    with pytest.raises(UsageError, match="nothing but their seed"):
        summarize("er", runs)


def test_joint_training_has_an_accuracy_and_no_transfer(tmp_path: Path) -> None:
    config = RunConfig.preset("seq-mnist", "joint", tasks=2)
    row = torch.tensor([[90.0, 70.0]], dtype=torch.float64)
    analysis = RunAnalysis(tmp_path, RunResult(config, row, row, torch.zeros(2), 1.0), None, None)
    summary = summarize("joint", [analysis])
    assert summary.accuracy == Estimate(80.0, None, None)
    assert summary.transfer.forgetting is None


def certain(labels: Tensor, share: float, towards: int) -> Tensor:
    """Confident logits, right for the first `share` of the samples, else for the class `towards`."""
    said = torch.where(torch.arange(len(labels)) < share * len(labels), labels, towards)
    return 12 * torch.nn.functional.one_hot(said, 4).float()


def worse(folder: Path, method: str, share: float) -> RunAnalysis:
    path = stored(folder, method)
    kept = load_file(path / results.LOGITS)
    for task in (0, 1):
        kept[f"logits.{task}"] = certain(kept[f"labels.{task}"], share, towards=3)
    save_file(kept, path / results.LOGITS)
    return analyze_run(path)


def test_claims_hold_or_not_by_the_numbers(tmp_path: Path) -> None:
    er, good, bad = worse(tmp_path, "er", 0.5), worse(tmp_path, "linf", 0.9), worse(tmp_path, "mi", 0.2)
    better = Findings("here", (summarize("er", [er]), summarize("linf", [good])))
    assert [claim.outcome for claim in better.claims] == ["holds in 1 of 1 (one check decides nothing)"] * 2
    assert not any(claim.holds for claim in better.claims)  # which used to be 'supported'
    assert "ECE: er 37.5" in better.claims[0].detail
    assert better.gains["linf"]["calibration"] == pytest.approx(48, abs=0.1)
    assert (better.gains["linf"]["recency"] or 0) > 0
    every = (("er", er), ("linf", good), ("mi", bad))
    mixed = Findings("here", tuple(summarize(name, [one]) for name, one in every)).claims
    assert [claim.holds for claim in mixed] == [False, False]
    assert "mi 60" in mixed[0].detail
    assert "linf" not in mixed[0].detail


def test_without_er_nothing_is_claimed(tmp_path: Path) -> None:
    found = Findings("here", (summarize("linf", [analyze_run(stored(tmp_path, "linf"))]),))
    assert (found.gains, found.claims) == ({}, ())
    assert json.loads(json.dumps(found.to_json()))["methods"][0]["method"] == "linf"


def test_shared_classes_gain_no_recency(tmp_path: Path) -> None:
    summaries = [summarize(m, [analyze_run(stored(tmp_path, m, shared=True))]) for m in ("er", "linf")]
    gained = Findings("here", tuple(summaries)).gains["linf"]
    assert gained["recency"] is None
    assert gained["accuracy"] == 0
