"""The blocks of a record from plain numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lra.results.blocks import curve_block, curve_so_far, data_block, result_block, speed_block
from lra.results.records import unpack_correct

POINT = {"step": 4, "train_loss": 0.7, "val_accuracy": 0.5, "val_loss": 0.6, "lr": 0.01}


def test_speed_is_of_the_timed_steps() -> None:
    found = speed_block(
        wall_time_s=9.0,
        train_time_s=4.0,
        eval_time_s=2.0,
        steps=8,
        examples=32,
        tokens=400,
        max_lr=0.1,
    )
    assert found == {"steps_per_s": 2.0, "examples_per_s": 8.0, "tokens_per_s": 100.0,
                     "train_time_s": 4.0, "eval_time_s": 2.0, "wall_time_s": 9.0,
                     "max_lr": 0.1}  # fmt: skip
    unknown = speed_block(wall_time_s=9.0)
    assert unknown == dict.fromkeys(found) | {"wall_time_s": 9.0}
    assert list(unknown) == list(found)


def test_the_result_holds_which_test_examples_were_right() -> None:
    right = np.array([True, False, True, True])
    result = result_block(4, val_accuracy=0.5, val_loss=0.6, num_val=10, test_accuracy=0.75,
                          test_loss=0.5, test_correct_N=right)  # fmt: skip
    assert (result.step, result.val.num_examples, result.test.num_examples) == (4, 10, 4)
    np.testing.assert_array_equal(unpack_correct(result.test.correct or "", 4), right)


def test_data_that_were_skipped_are_counted() -> None:
    reports = {"train": {"truncated": 2, "skipped": ["a", "b"]},
               "val": {"truncated": 0, "skipped": []}}  # fmt: skip
    assert data_block("files in data", "abc", {"train": 5, "val": 3}, reports) == {
        "source": "files in data", "fingerprint": "abc", "num_examples": {"train": 5, "val": 3},
        "truncated": {"train": 2, "val": 0}, "skipped": {"train": 2, "val": 0},
    }  # fmt: skip


def test_the_curve_of_a_run_without_result_is_in_its_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert curve_so_far(path) == []
    rows = [{"split": "train", "step": 1, "loss": 0.7}, {"split": "val"} | POINT]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"split": "va')
    assert curve_so_far(path) == [POINT] == curve_block([POINT])
    with pytest.raises(ValueError, match=r"curve\[0\].step='4': expected an integer"):
        curve_block([POINT | {"step": "4"}])
