"""Intervals and the comparison of two models."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lra.results.records import Record, RunResult, SplitResult, save
from lra.results.statistics import Comparison, compare, mean_std, t_95, wilson
from tests import programs
from tests.made_up import make_record

ROOT = Path(__file__).resolve().parents[2]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return programs.call("scripts/compare.py", *words)


def test_mean_and_sample_deviation() -> None:
    values = [0.1, 0.35, 0.36, 0.9]
    mean, std = mean_std(values)
    assert mean == pytest.approx(statistics.mean(values))
    assert std == pytest.approx(statistics.stdev(values), rel=1e-14)
    assert mean_std([0.3]) == (0.3, None)


def test_wilson_interval_against_published_values() -> None:
    # Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29.
    for r, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605),
                            (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert wilson(r / n, n) == pytest.approx((low, high), abs=5e-5)


def test_student_t_points() -> None:
    known = {1: 12.706, 2: 4.303, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 100: 1.984}
    for degrees, value in known.items():
        assert t_95(degrees) == pytest.approx(value, abs=1.1e-3)


def test_compare_by_hand() -> None:
    a_SN = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    b_SN = np.array([[1, 0, 1, 0], [0, 0, 0, 0]], bool)
    result = compare(a_SN, b_SN)
    # Differences by example (0.5, 1, 0, 0), by seed (0.25, 0.5).
    assert result.difference == 0.375 and result.per_seed == (0.25, 0.5)
    half = 1.959964 * statistics.stdev([0.5, 1, 0, 0]) / 2
    assert result.over_examples == pytest.approx((0.375 - half, 0.375 + half))
    half = 12.706 * statistics.stdev([0.25, 0.5]) / math.sqrt(2)
    assert result.over_seeds == pytest.approx((0.375 - half, 0.375 + half))
    assert not result.clear
    assert compare(a_SN[:1], b_SN[:1]).over_seeds is None


def test_a_difference_is_clear_only_if_every_interval_says_so() -> None:
    above, around, below = (0.01, 0.2), (-0.1, 0.2), (-0.2, -0.01)
    cases = [(above, above, True), (below, below, True), (above, None, True), (around, None, False),
             (above, around, False), (around, above, False), (around, around, False)]  # fmt: skip
    for over_examples, over_seeds, clear in cases:
        assert Comparison(0.1, over_examples, over_seeds, (0.1,)).clear == clear


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    over_examples = over_seeds = 0
    for _ in range(400):
        easy_N = rng.random(500)  # examples differ in difficulty, so the pairs are correlated
        a_SN = rng.random((3, 500)) < 0.2 + 0.6 * easy_N
        b_SN = rng.random((3, 500)) < 0.15 + 0.6 * easy_N
        result = compare(a_SN, b_SN)
        over_examples += result.over_examples[0] <= 0.05 <= result.over_examples[1]
        over_seeds += bool(
            result.over_seeds and result.over_seeds[0] <= 0.05 <= result.over_seeds[1]
        )
    assert 0.92 <= over_examples / 400 <= 0.98
    assert 0.92 <= over_seeds / 400 <= 0.98


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"shapes \(1, 4\) and \(2, 4\) must be equal"):
        compare(np.ones((1, 4), bool), np.ones((2, 4), bool))


def write_pair(results: Path, gap: float, seeds: int = 3) -> None:
    rng = np.random.default_rng(1)
    for seed in range(seeds):
        for model, rate in (("luna", 0.40 + gap), ("softmax", 0.40)):
            correct = rng.random(2000) < rate
            save(
                make_record("listops", model, seed, float(correct.mean()), correct=correct), results
            )


def test_a_clear_difference_and_one_that_is_noise(tmp_path: Path) -> None:
    write_pair(tmp_path / "clear", 0.20)
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path / 'clear'}")
    assert done.returncode == 0, done.stderr
    assert "ListOps" in done.stdout and "2,000 examples, seeds 0, 1, 2" in done.stdout
    assert "stands out from the noise" in done.stdout
    write_pair(tmp_path / "noise", 0.0)
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path / 'noise'}")
    assert "cannot be told from noise" in done.stdout
    write_pair(tmp_path / "one", 0.20, seeds=1)
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path / 'one'}")
    assert "only one common seed" in done.stdout and "over seeds" not in done.stdout


def test_settings_are_chosen_by_key(tmp_path: Path) -> None:
    save(make_record(accuracy=0.4), tmp_path)
    save(make_record(accuracy=0.6, overrides={"model.projection_length": 128}), tmp_path)
    here = f"--results={tmp_path}"
    done = command("luna", "luna", "task=listops", here)
    assert done.returncode == 2 and "2 settings" in done.stderr
    assert "projection_length=128" in done.stderr and "projection_length=16" in done.stderr
    done = command("luna:projection_length=128", "luna:projection_length=16", "task=listops", here)
    assert done.returncode == 0 and "+20.00 points" in done.stdout
    done = command("luna:projection_length=64", "luna:projection_length=16", "task=listops", here)
    assert done.returncode == 2 and "none of the model's finished runs has" in done.stderr


def test_a_short_key_is_not_that_of_a_group_and_never_two(tmp_path: Path) -> None:
    for decay, accuracy in ((0.05, 0.6), (0.0, 0.5)):
        keys = {"train.weight_decay": decay, "train.groups.state.weight_decay": 0.0}
        save(make_record(model="s4d", accuracy=accuracy, overrides=keys), tmp_path)
    save(make_record(accuracy=0.4, overrides={"shape.lr": 1}), tmp_path)
    here = f"--results={tmp_path}"
    for value, difference in (("0.0", "+10.00 points"), ("0.05", "+20.00 points")):
        done = command(f"s4d:weight_decay={value}", "luna", "task=listops", here)
        assert done.returncode == 0 and difference in done.stdout, done.stderr
    done = command("luna:lr=1", "s4d", "task=listops", here)
    assert done.returncode == 2 and "lr may be shape.lr or train.lr; name one" in done.stderr


def test_a_record_from_before_a_key_has_its_default(tmp_path: Path) -> None:
    for seed in (0, 1):
        save(make_record("listops", "luna", seed, 0.4), tmp_path)
        new = {"shape.norm_kind": "layer"} if seed else {}
        save(make_record("listops", "softmax", seed, 0.3, overrides=new), tmp_path)
    done = command("luna", "softmax:norm_kind=layer", "task=listops", f"--results={tmp_path}")
    assert done.returncode == 0 and "+10.00 points" in done.stdout, done.stderr
    assert "seeds 0, 1" in done.stdout


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    def refusal(folder: str, softmax: Record, luna: Record | None = None) -> str:
        for record in (softmax, luna or make_record()):
            save(record, tmp_path / folder)
        done = command("luna", "softmax", "task=listops", f"--results={tmp_path / folder}")
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    softmax = make_record(model="softmax")
    assert softmax.result
    other = dataclasses.replace(softmax, data=softmax.data | {"fingerprint": "other"})
    assert "different data: fingerprints ['listops0123456789', 'other']" in refusal("a", other)
    assert "no common seed: [0] and [5]" in refusal("b", make_record(model="softmax", seed=5))
    blank = RunResult(1, softmax.result.val, SplitResult(0.37, 1.0, 2000))
    assert "does not say which" in refusal("c", dataclasses.replace(softmax, result=blank))
    assert "no finished run" in refusal("d", make_record(model="softmax", status="diverged"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["luna", "task=listops"], "expected two models and task=NAME"),
        (["luna", "softmax"], "expected two models and task=NAME"),
        (["luna", "softmax", "task=listop"], "did you mean 'listops'?"),
        (["luna", "softmax", "task=text"], "luna: no finished run of this task and recipe"),
        (["luna", "softmax", "task=listops", "seed=1"], "expected two models"),
        (["luna", "softmx"], "softmx: not a model; did you mean 'softmax'?"),
        (["luna", "softmax", "task=listops", "recipe=LRA"], "did you mean 'lra'?"),
        (["luna", "luna", "task=listops"], "both sides are the same runs"),
    ],
)
def test_wrong_words_are_explained(words: list[str], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2 and message in done.stderr


def test_reduced_runs_are_said_to_be_so(tmp_path: Path) -> None:
    for model in ("luna", "softmax"):
        save(make_record(model=model, budget="reduced"), tmp_path)
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path}")
    assert done.returncode == 0 and "note: luna: reduced budget" in done.stdout
    assert "no kind of run in common" not in done.stdout


def test_the_best_kind_that_both_have_is_taken_and_the_rest_named(tmp_path: Path) -> None:
    reduced = {"budget": "reduced", "overrides": {"train.num_steps": 100}}
    save(make_record(model="softmax", accuracy=0.30, **reduced), tmp_path)
    save(make_record(accuracy=0.35, **reduced), tmp_path)
    save(make_record(accuracy=0.40), tmp_path)
    save(make_record(seed=1, status="diverged"), tmp_path)
    words = ["luna", "softmax", "task=listops", f"--results={tmp_path}"]
    done = command(*words)
    assert done.returncode == 0 and "+5.00 points" in done.stdout, done.stderr
    assert "reduced budget, the only setting" in done.stdout
    assert "note: it is the best kind of run that both models have" in done.stdout
    assert re.search("left out +luna: diverged: 1; full budget: 1$", done.stdout, re.MULTILINE)
    save(make_record(model="softmax", seed=7, accuracy=0.33), tmp_path)
    done = command(*words)
    assert done.returncode == 2 and "no common seed: [0] and [7]" in done.stderr
    for path in tmp_path.glob("runs/*/*/*.json"):
        path.unlink()
    save(make_record(accuracy=0.40), tmp_path)
    save(make_record(model="softmax", accuracy=0.30, **reduced), tmp_path)
    done = command(*words)
    assert "no kind of run in common" in done.stdout and "note: softmax: reduced" in done.stdout


def test_two_seeds_are_said_to_tell_next_to_nothing(tmp_path: Path) -> None:
    write_pair(tmp_path, 0.20, seeds=2)
    save(make_record(seed=4), tmp_path)
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path}")
    assert "only two common seeds: they tell next to nothing" in done.stdout
    assert "luna: no such seed of the other model: 4" in done.stdout


def test_the_recipes_own_setting_is_taken_from_the_records_of_the_project() -> None:
    done = command("luna", "transformer", "task=listops", f"--results={ROOT / 'results'}")
    assert done.returncode == 0, done.stderr
    assert "luna: listops-luna-seed0-77385b73" in done.stdout
    assert "softmax: listops-softmax-seed0-4639468c" in done.stdout
    assert "the recipe's own setting (recipe=nystromformer projection_length=16)" in done.stdout
    assert "another setting (recipe=nystromformer projection_length=128): 1" in done.stdout


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    done = command("luna", "softmax", "task=listops", f"--results={tmp_path}")
    assert done.returncode == 2 and f"{tmp_path}/runs: no records" in done.stderr


def test_self_pretraining_is_compared_with_its_control_only_when_asked_for(tmp_path: Path) -> None:
    write_pair(tmp_path, 0.0)
    for seed in range(2):
        save(make_record(seed=seed, accuracy=0.9, pretrain="masked"), tmp_path)
    here = f"--results={tmp_path}"
    done = command("luna", "softmax", "task=listops", here)
    assert done.returncode == 0 and "noise" in done.stdout and "90.00" not in done.stdout
    done = command("luna:pretrain=masked", "luna", "task=listops", here)
    assert "seeds 0, 1" in done.stdout and "note: luna:pretrain=masked: self-pre" in done.stdout
    done = command("luna", "--control", "task=listops", here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("self-pretraining: masked 10 %, 5,000 steps of 32: val loss")
    told = "no control of luna is on record: python run.py -m model=luna task=listops"
    assert f"{told} train.num_steps=10000 seed=0,1\n" in done.stdout
    for seed in range(3):
        long = {"train.num_steps": 10000, "train.eval_every": 100}
        save(make_record(seed=seed, accuracy=0.5, overrides=long), tmp_path)
    done = command("luna:pretrain=masked", "--control", "task=listops", here)
    assert "difference              +40.00 points" in done.stdout and "seeds 0, 1" in done.stdout
    assert "no such seed of the other model: 2" in done.stdout and "stands out" in done.stdout
    # A setting whose control has other seeds keeps nothing from the reader of the others.
    wide = {"shape.d_model": 128}
    save(make_record(seed=0, accuracy=0.9, pretrain="masked", overrides=wide), tmp_path)
    save(make_record(seed=5, accuracy=0.5, overrides=long | wide), tmp_path)
    done = command("luna", "--control", "task=listops", here)
    assert done.returncode == 0, done.stderr
    assert "luna d_model=128 cannot be compared with its control: no common seed: [0] and [5]" in (
        done.stdout
    )
    assert "difference              +40.00 points" in done.stdout
    for words, message in (
        (
            ["softmax", "--control", "task=listops"],
            "softmax: no finished run with self-pretraining",
        ),
        (["luna:pretrain=next", "--control", "task=listops"], "known: masked"),
        (["luna", "softmax", "--control", "task=listops"], "expected one model and task=NAME"),
    ):
        done = command(*words, here)
        assert done.returncode == 2 and message in done.stderr
