"""Linformer: naive version with every way of sharing, holes in masks, tables of layers, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.classifier import Classifier
from models.linformer import LinformerAttention, LinformerEncoder
from models.shape import Shape
from tests.references.linformer import linformer_attention

SMALL = Shape(vocab_size=9, max_length=20, d_model=12, num_heads=2)


def mixer(shape: Shape = SMALL, **knobs: Any) -> LinformerAttention:
    """Large tables and maps, so that attention is far from uniform and every option shows."""
    torch.manual_seed(0)
    model = LinformerAttention(shape, **{"rank": 3} | knobs).double().eval()
    with torch.no_grad():
        model.query.weight.mul_(4)
        model.table_SGRM.normal_()
    return model


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x_BLD = torch.randn(len(lengths), max(lengths), 12, dtype=torch.float64)
    mask_BL = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return x_BLD.masked_fill(~mask_BL[..., None], 1e3), mask_BL


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_row": {"rank": 1},
    "more_rows_than_tokens": {"rank": 25},
    "own_tables_of_keys_and_values": {"share_kv": False},
    "own_tables_of_heads": {"share_heads": False},
    "nothing_shared": {"share_kv": False, "share_heads": False},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str, bias: bool) -> None:
    model = mixer(replace(SMALL, attention_bias=bias, head_dim=5), **OPTIONS[name])
    x_BLD, mask_BL = batch(13, 7, 1)
    mask_BL[0, 2:5] = False  # holes, as no task has them
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD, naive_BLD = model(x_BLD, mask_BL), linformer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-10, atol=1e-11)
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-10)
        assert ours.any()


@pytest.mark.parametrize("share", [True, False])
def test_layers_share_one_table_or_have_their_own(share: bool) -> None:
    shape = replace(SMALL, num_layers=3)
    torch.manual_seed(0)
    encoder = LinformerEncoder(shape, rank=4, share_layers=share)
    tables = [block.mixer.table_SGRM for block in encoder.blocks]
    assert all((table is tables[0]) == share for table in tables[1:])
    per_layer = sum(p.numel() for p in encoder.blocks[0].parameters()) - 4 * 20
    num_tables = 1 if share else 3
    found = sum(p.numel() for p in encoder.blocks.parameters())
    assert found == 3 * per_layer + num_tables * 4 * 20

    # A checkpoint restores it, and a step changes it in all layers alike.
    model = Classifier(encoder, shape, 3)
    other = Classifier(LinformerEncoder(shape, rank=4, share_layers=share), shape, 3)
    other.load_state_dict(model.state_dict())
    assert all((block.mixer.table_SGRM is other.encoder.blocks[0].mixer.table_SGRM) == share
               for block in other.encoder.blocks[1:])  # fmt: skip
    other = other.to(torch.float64)
    same = [block.mixer.table_SGRM is other.encoder.blocks[0].mixer.table_SGRM
            for block in other.encoder.blocks[1:]]  # fmt: skip
    assert same == [share] * 2


def test_tables_start_as_in_the_sources() -> None:
    shape = Shape(vocab_size=9, max_length=1000, pooling="cls", init="lra")
    table = LinformerAttention(shape, rank=40).table_SGRM
    assert table.shape == (1, 1, 40, 1001)
    assert float(table.detach().abs().max()) == pytest.approx((6 / 1041) ** 0.5, rel=0.01)
    table = LinformerAttention(replace(shape, init="torch"), rank=40).table_SGRM
    assert float(table.detach().std()) == pytest.approx(0.02, rel=0.02)


def test_dropout_acts_on_weights_in_training_only() -> None:
    model = mixer(replace(SMALL, attention_dropout=0.5))
    rows = batch(9)
    assert torch.equal(model(*rows), model(*rows))
    assert not torch.equal(model.train()(*rows), model(*rows))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"rank": 0}, "model.rank=0: expected at least 1"),
        ({"causal": True}, "model.causal=true: .* sum over all tokens"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinformerEncoder(SMALL, **knobs)
