"""Probes on models of which it is known how far they look, and what they refuse."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lra import probes
from lra.build import make_model, make_task
from lra.cli import all_models, compose_config, typed
from lra.probes import Rows
from lra.results import probes as stored
from lra.results.floors import Data, Floor, Floors, Score
from lra.results.floors import save as save_floors
from lra.results.records import pack_correct
from lra.results.statistics import sign_test
from models.classifier import Classifier
from models.conv import ConvMixer
from models.encoder import Encoder, make_encoder
from models.luna import LunaEncoder
from models.none import NoMixing
from models.shape import Shape
from models.softmax import SoftmaxAttention
from scripts import probe as probe_script

NUM_VALUES, LENGTH = 4, 64
SMALL = Shape(
    vocab_size=NUM_VALUES + 1, max_length=LENGTH, d_model=16, d_ff=24, num_layers=2, dropout=0.0,
    attention_dropout=0.0, head_hidden=(12,),
)  # fmt: skip


class Reader(nn.Module):
    """Knows the value of one token, and answers class 0 where there is none."""

    num_classes = NUM_VALUES

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        if self.place >= tokens_BSL.shape[2]:
            return torch.eye(NUM_VALUES)[[0] * len(tokens_BSL)]
        value_B = (tokens_BSL[:, 0, self.place] - 1).clamp(min=0)
        return torch.eye(NUM_VALUES)[value_B]


def rows(place: int = 0, *, count: int = 200, batch_size: int = 16) -> Rows:
    """Random examples of 33 to 64 values, whose class is the value at one place."""
    rng = np.random.default_rng(0)
    examples = [
        (rng.integers(NUM_VALUES, size=rng.integers(LENGTH // 2 + 1, LENGTH + 1)).astype(np.uint8),)
        for _ in range(count)
    ]
    labels_N = np.array([example[0][place] for example in examples])
    numbers_N = np.arange(count)
    return Rows(examples, numbers_N, labels_N, LENGTH, batch_size, torch.device("cpu"), seed=3)


def classifier(mixer: Any, **knobs: Any) -> Classifier:
    shape = replace(SMALL, **{k: v for k, v in knobs.items() if hasattr(SMALL, k)})
    own = {k: v for k, v in knobs.items() if not hasattr(SMALL, k)}
    torch.manual_seed(0)
    return Classifier(make_encoder(mixer, shape, **own), shape, NUM_VALUES).double().eval()


def test_windows_find_where_the_evidence_lies() -> None:
    by = {(w.size, w.place): w for w in probes.windows(Reader(0), rows(0))}  # type: ignore[arg-type]
    assert {size for size, _ in by} == {16, 32, 64}
    assert all(by[size, "first"].accuracy == 1 for size in (16, 32, 64))
    assert by[16, "best"].accuracy == 1 and by[16, "last"].accuracy < 0.4
    assert by[16, "first"].error == 0 and 0.02 < by[16, "last"].error < 0.04
    # Evidence at place 20 is in no window of 16 tokens from the first, and in the one of 32.
    by = {(w.size, w.place): w for w in probes.windows(Reader(20), rows(20))}  # type: ignore[arg-type]
    assert by[16, "first"].accuracy < 0.4 and by[32, "first"].accuracy == 1


def test_shuffles_hurt_a_reader_of_one_place() -> None:
    found = {(s.block, s.kind): s.accuracy for s in probes.shuffles(Reader(20), rows(20))}  # type: ignore[arg-type]
    assert {block for block, _ in found} == {1, 2, 4, 8, 16, 32}
    assert all(accuracy < 0.75 for accuracy in found.values())


def test_a_bag_is_no_worse_for_any_shuffle() -> None:
    model, given = classifier(NoMixing, positions="none"), rows()
    given = replace(given, labels_N=probes.logits(model, given.examples, given).argmax(axis=1))
    assert all(s.accuracy == 1 for s in probes.shuffles(model, given))


@pytest.mark.parametrize("block", [1, 3, 64, 100])
@pytest.mark.parametrize("kind", ["blocks", "within"])
def test_shuffled_keeps_tokens_and_blocks(kind: str, block: int) -> None:
    sequence = np.arange(50)
    moved = probes.shuffled(sequence, block, kind, np.random.default_rng(0))
    assert sorted(moved) == list(sequence)
    if kind == "within":
        whole = 50 // block * block
        assert (moved[:whole] // block == sequence[:whole] // block).all()
    elif block == 3:
        starts = [i for i in range(49) if moved[i] % 3 == 0 and moved[i] < 48]
        assert all((moved[i : i + 3] == moved[i] + np.arange(3)).all() for i in starts)


def test_influence_ends_where_a_convolution_does() -> None:
    model = classifier(ConvMixer, kernel_size=5, positions="none")  # two layers: 4 positions
    assert model.encoder.reach == [2, 2]
    found = probes.influence(
        model, classifier(ConvMixer, kernel_size=5), rows(), num_values=NUM_VALUES, num_replaced=50
    )
    by = {i.distance: i for i in found}
    assert sorted(by) == [0, 1, 2, 4, 8, 16, 32]
    for distance, change in by.items():
        assert change.positions is not None and change.untrained is not None
        assert (change.positions > 0) == (change.untrained > 0) == (distance <= 4)
        assert change.logits is not None and change.logits > 0  # the mean reads every place


def test_a_replaced_token_is_another_value() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        example = (np.zeros(5, np.uint8),)
        changed = probes.replace_token(example, 2, NUM_VALUES, rng)
        assert 0 < changed[0][2] < NUM_VALUES and changed[0].sum() == changed[0][2]
    assert example[0].sum() == 0


def test_no_probe_depends_on_batches() -> None:
    model = classifier(SoftmaxAttention)
    results = [
        [
            *probes.windows(model, given), *probes.shuffles(model, given),
            *probes.influence(model, model, given, num_values=NUM_VALUES, num_replaced=10),
        ]
        for given in (rows(count=12, batch_size=5), rows(count=12, batch_size=12))
    ]  # fmt: skip
    for one, other in zip(*results, strict=True):
        for key, value in vars(one).items():
            same = vars(other)[key]
            assert value == (same if isinstance(same, str) else pytest.approx(same, rel=1e-6)), key


def test_a_part_has_each_class_by_its_share_and_draws_by_number() -> None:
    """Also where a split lies class by class, as that of Text does."""
    given = replace(rows(count=40), labels_N=np.arange(40) // 30)
    chosen = given.some([i for i in range(40) if i % 2], 8)
    assert all(i % 2 for i in chosen) and [i // 30 for i in chosen] == [0] * 6 + [1] * 2
    assert given.some([3, 5], 8) == [3, 5]
    moved = replace(given, numbers_N=np.arange(40) + 7)
    assert moved.draws(2, 1, 0, 0).random() == given.draws(2, 1, 7, 0).random()


def test_padding_is_as_in_the_evaluation_of_the_run() -> None:
    model = classifier(NoMixing, positions="none", pooling="padded_mean", max_length=256)
    given = rows(count=6, batch_size=1)
    padded = replace(given, pad_to=4 * LENGTH)
    tokens_BSL = torch.zeros(6, 1, 4 * LENGTH, dtype=torch.long)
    for row, (values,) in zip(tokens_BSL, given.examples, strict=True):
        row[0, : len(values)] = torch.from_numpy(values.astype(int)) + 1
    lengths_BS = torch.tensor([[len(values)] for (values,) in given.examples])
    with torch.no_grad():
        expected = model(tokens_BSL, lengths_BS).numpy()
    assert np.allclose(probes.logits(model, padded.examples, padded), expected)
    assert not np.allclose(probes.logits(model, given.examples, given), expected)


@pytest.mark.parametrize("name", all_models())
def test_every_model_can_be_probed(name: str) -> None:
    small = ["shape.d_model=16", "shape.d_ff=16", "shape.num_heads=2", "shape.head_dim=8"]
    config = typed(compose_config([f"model={name}", "task=listops", *small]))
    model, given = make_model(config, make_task(config)).eval(), rows(count=3)
    found = probes.influence(model, model, given, num_values=NUM_VALUES, num_replaced=2)
    assert all(i.positions == i.untrained and i.logits is not None for i in found)
    assert found[0].positions is not None and found[0].positions > 0
    heads = probes.attention(model, given, num_examples=2)
    assert len(heads) == (4 if name == "softmax" else 0)


@pytest.mark.parametrize("slots", [4, 2 * LENGTH])
def test_slots_of_a_memory_stand_at_no_distance_from_a_token(slots: int) -> None:
    encoder = LunaEncoder(SMALL, projection_length=slots, pool_memory=True)
    model, given = Classifier(encoder, SMALL, NUM_VALUES).eval(), rows(count=3)
    found = probes.influence(model, model, given, num_values=NUM_VALUES, num_replaced=2)
    assert all(i.positions is i.untrained is None and i.logits is not None for i in found)


def test_a_token_alone_has_no_neighbour_to_influence() -> None:
    model, given = classifier(NoMixing), rows(count=3)
    single = replace(given, examples=[(values[:1],) for (values,) in given.examples])
    assert probes.influence(model, model, single, num_values=NUM_VALUES, num_replaced=2) == []


def test_attention_has_the_distances_of_its_weights() -> None:
    model, given = classifier(SoftmaxAttention, num_layers=1, positions="none"), rows(count=5)
    with torch.no_grad():
        model.encoder.blocks[0].mixer.qkv.weight.zero_()  # type: ignore[union-attr]
    found = probes.attention(model, given, num_examples=5)
    assert [(a.layer, a.head) for a in found] == [(1, 1), (1, 2)]
    expected = np.mean([(n * n - 1) / (3 * n) for n in (len(e[0]) for e in given.examples)])
    assert all(a.distance == pytest.approx(expected) == a.uniform for a in found)
    assert probes.attention(classifier(NoMixing), given, num_examples=5) == []


def test_sign_test_against_the_binomial_distribution() -> None:
    assert sign_test(0, 0) == (0.0, 1.0)
    assert sign_test(8, 2)[1] == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test(2, 8) == (-sign_test(8, 2)[0], sign_test(8, 2)[1])
    assert sign_test(5, 5)[1] == 1.0


def test_beside_a_rule_by_class() -> None:
    labels_N = np.array([0, 0, 1, 1])
    rule_N, run_N = np.array([True, True, False, False]), np.array([True, False, True, False])
    score = Score(0.5, 4, pack_correct(rule_N))
    floors = Floors(
        "toy",
        Data("", "files", "", {"val": 4, "test": 4}),
        [Floor("rule", "a", score, score)],
        [Floor("rung", "b", score, score)],
    )
    given = replace(rows(count=4), labels_N=labels_N)
    whole, first, second, *rung = probes.beside_floors(run_N, given, floors)
    assert {r.name for r in rung} == {"rung"} and rung[0].agreement == whole.agreement
    assert (whole.label, whole.agreement, whole.only_run, whole.only_floor) == (None, 0.5, 1, 1)
    assert (first.label, first.only_run, first.only_floor, first.num_examples) == (0, 0, 1, 2)
    assert (second.label, second.only_run, second.only_floor) == (1, 1, 0)
    some = replace(given, numbers_N=np.array([1, 3]), labels_N=labels_N[[1, 3]])
    part = probes.beside_floors(run_N[[1, 3]], some, floors)[0]
    assert (part.num_examples, part.only_run, part.only_floor) == (2, 0, 1)


def test_rules_are_of_the_very_test_examples(tmp_path: Path) -> None:
    score = Score(0.5, 4, pack_correct(np.array([True, False, True, False])))
    data = Data("s", "files", "f" * 64, {"val": 4, "test": 4})
    floors = Floors("listops", data, [Floor("a", "a", score, score)])
    path = save_floors(floors, tmp_path)

    def of(fingerprint: str, num_test: int) -> Any:
        return SimpleNamespace(fingerprint=fingerprint, num_examples={"test": num_test})

    assert probes.own_floors(path, of("f" * 64, 4)) == floors
    assert probes.own_floors(path, of("e" * 64, 4)) is None
    assert probes.own_floors(path, of("f" * 64, 2)) is None  # limit_test=2
    assert probes.own_floors(tmp_path / "none.json", of("f" * 64, 4)) is None


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(1.033, 0.049, "1.03 ± 0.05"), (1.168, 0.06, "1.17 ± 0.06"),
     (0.01234, 0.00096, "0.012 ± 0.001"), (12.3, 2.0, "12 ± 2"), (0.0, 0.0, "0"),
     (0.25, None, "0.25"), (None, None, "")],
)  # fmt: skip
def test_a_change_has_the_decimals_of_its_error(
    value: float | None, error: float | None, text: str
) -> None:
    assert probe_script.small(value, error) == text


def test_all_runs_are_looked_for_before_the_first_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good.pt"
    good.touch()
    monkeypatch.setattr("lra.probes.probe", lambda *_, **__: pytest.fail("probed"))
    monkeypatch.setattr(sys, "argv", ["probe.py", str(good), str(tmp_path / "bad")])
    with pytest.raises(ValueError, match="bad: no such run folder or checkpoint file"):
        probe_script.main()


def test_probes_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole = stored.Probes(
        "run", "toy", "conv", "abc", 10, 0, 4, 2, 0.5, 0.1, 1.0, [], [], [], [], []
    )
    path = stored.save(whole, tmp_path)
    assert stored.load(path) == whole and stored.load_all(tmp_path) == ([whole], [])
    path.write_text(path.read_text().replace('"reach": 4', '"reach": "far"'))
    with pytest.raises(ValueError, match=r"run.json: reach='far'"):
        stored.load(path)


def test_reach_is_of_each_layer_or_unknown() -> None:
    assert classifier(NoMixing).encoder.reach == [0, 0]
    assert classifier(SoftmaxAttention).encoder.reach is None
    assert isinstance(classifier(NoMixing).encoder, Encoder)
