"""Plain values in, checked objects out: what is refused, and which name was meant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest

from lra.cli import CONFIGS, GROUPS, compose_config
from lra.config import HardwareConfig
from lra.values import SYNONYMS, convert, fill, flatten, nearest_key


@dataclass
class Sample:
    size: int
    mode: Literal["a", "b"] = "a"
    inner: HardwareConfig | None = None


def test_nested_classes_and_context() -> None:
    sample = fill(Sample, {"inner": {"num_workers": 3}}, size=2)
    assert sample.inner is not None and sample.inner.num_workers == 3 and sample.size == 2
    with pytest.raises(ValueError, match="size=4: unknown key"):
        fill(Sample, {"size": 4}, size=2)
    with pytest.raises(ValueError, match="size is missing"):
        fill(Sample, {})


def test_values_of_mappings_are_checked_too() -> None:
    assert convert({"a": 1, "b": None}, dict[str, int | float | None], "x") == {"a": 1, "b": None}
    assert type(convert({"a": 1}, dict[str, int | float], "x")["a"]) is int
    with pytest.raises(ValueError, match=r"x\.b='2': expected a number$"):
        convert({"a": 1, "b": "2"}, dict[str, float], "x")
    with pytest.raises(ValueError, match=r"x\.a\[1\]='2': expected an integer$"):
        convert({"a": [1, "2"]}, dict[str, list[int]] | None, "x")


def test_what_is_wrong_within_an_optional_part_is_named_by_itself() -> None:
    with pytest.raises(ValueError, match=r"^inner\.num_worker=1: unknown key; did you mean"):
        fill(Sample, {"inner": {"num_worker": 1}}, size=2)
    with pytest.raises(ValueError, match="^inner=3: expected keys with values or null"):
        fill(Sample, {"inner": 3}, size=2)


def test_flatten() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("lr", "train.lr"),  # the last part of a key
        ("model.num_heads", "shape.num_heads"),  # it before letters in common, num_packed_heads
        ("shape.layers", "shape.num_layers"),
        ("train.step", "train.num_steps"),
        ("learning_rate", "train.lr"),  # initials
        ("dropout_rate", "shape.dropout"),
        ("trian.batch_sise", "train.batch_size"),
        ("batch", "train.batch_size"),  # fewer words more than micro_batch_size
        ("epochs", "train.num_steps"),
        ("colour", None),
    ],
)
def test_the_nearest_key_of_all_sections(typed: str, meant: str | None) -> None:
    known = ["train.num_steps", "train.batch_size", "train.lr", "model.num_packed_heads",
             "shape.num_heads", "shape.tie_layers", "shape.num_layers", "shape.attention_dropout",
             "shape.dropout", "hardware.micro_batch_size", "seed"]  # fmt: skip
    assert nearest_key(typed, known) == meant
    assert nearest_key("trian.lrr", known, 2) is None  # letters alone are not enough there


def test_other_names_stand_for_keys_and_choices_that_there_are() -> None:
    choices = {path.stem for path in CONFIGS.glob("*/*.yaml")}
    keys = {key.rpartition(".")[2] for key in flatten(compose_config([]))}
    precisions = set(get_args(get_type_hints(HardwareConfig)["precision"]))
    assert {*SYNONYMS.values()} <= choices | keys | precisions | set(GROUPS)


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/someone")
    assert convert("~/lra", Path, "paths.data") == Path("/home/of/someone/lra")
    assert convert("data", Path, "paths.data") == Path("data")
    with pytest.raises(ValueError, match=r"paths.data='?~nobody.here/lra'?: "):
        convert("~nobody.here/lra", Path, "paths.data")


@pytest.mark.parametrize("value", ["", " "])
def test_nothing_is_no_path(value: str) -> None:
    with pytest.raises(ValueError, match=f"paths.outputs='{value}': expected a path"):
        convert(value, Path, "paths.outputs")
