"""Forms of Luna and Fastformer that multiply linear maps first: equal to the plain forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.fastformer import FastformerAttention
from models.luna import LunaAttention, LunaEncoder
from models.shape import Shape
from tests.models.test_models import largest_difference
from tests.references.fastformer import fastformer_attention
from tests.references.luna import luna_encoder

SHAPE = Shape(
    vocab_size=9,
    max_length=40,
    d_model=12,
    d_ff=16,
    num_heads=3,
    dropout=0.0,
    attention_dropout=0.0,
)
LENGTHS = (40, 13, 1)


def shaken(model: Any) -> Any:
    """In float64 and away from the initial values, so that every part of the model matters."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def rows(*lengths: int) -> tuple[Tensor, Tensor]:
    tokens_BL = torch.randint(1, 9, (len(lengths), max(lengths)))
    return tokens_BL, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def vectors(*lengths: int) -> tuple[Tensor, Tensor]:
    x_BLD = torch.randn(len(lengths), max(lengths), SHAPE.d_model, dtype=torch.float64)
    return x_BLD.requires_grad_(), rows(*lengths)[1]


def with_gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> dict[str, int]:
    calls = dict.fromkeys(names, 0)

    def counted(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return method(*args)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name))
    return calls


# Luna: the limit is as many slots, over all heads, as columns.

LUNA: dict[str, tuple[Shape, dict[str, Any]]] = {
    "default": (SHAPE, {}),
    "tied": (SHAPE, {"tie_kv": True}),
    "no_bias": (replace(SHAPE, attention_bias=False), {}),
    "no_bias_tied": (replace(SHAPE, attention_bias=False), {"tie_kv": True}),
    "wide_heads": (replace(SHAPE, head_dim=5), {"num_packed_heads": 2}),
    "fixed": (SHAPE, {"dynamic_projection": False}),
    "post_norm": (replace(SHAPE, norm="post", embedding_norm=True), {}),
    "class_token": (replace(SHAPE, pooling="cls"), {}),
    "pool_memory": (SHAPE, {"pool_memory": True}),
}


@pytest.mark.parametrize("num_slots", [1, 4])
@pytest.mark.parametrize("name", LUNA)
def test_luna_with_few_slots(name: str, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, knobs = LUNA[name]
    torch.manual_seed(0)
    encoder = shaken(LunaEncoder(shape, projection_length=num_slots, **knobs))
    tokens_BL, mask_BL = rows(*LENGTHS)
    real_BL = encoder.output_mask(mask_BL)
    parameters = [
        parameter
        for key, parameter in encoder.named_parameters()
        # A classifier of the memory never uses the last layer's way back to the tokens.
        if not knobs.get("pool_memory")
        or ("blocks.1" not in key and not key.startswith("norm"))
        or any(part in key for part in ("pack", "norm1", "memory_norm"))
    ]
    naive = with_gradients(luna_encoder(encoder, tokens_BL, mask_BL)[real_BL], *parameters)
    calls = count_calls(monkeypatch, LunaAttention, "_pack_few", "_unpack_few")
    ours = with_gradients(encoder(tokens_BL, mask_BL)[real_BL], *parameters)
    assert calls == {"_pack_few": 2, "_unpack_few": 2}
    for a, b in zip(ours, naive, strict=True):
        assert largest_difference(a, b) < 1e-9


@pytest.mark.parametrize(("num_slots", "expected"), [(4, 1), (5, 0)])
def test_luna_takes_the_shorter_way(
    num_slots: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, LunaAttention, "_pack_few", "_unpack_few")
    mixer = LunaAttention(SHAPE, num_packed_heads=3, tie_kv=False).double()
    x_BLD, mask_BL = vectors(*LENGTHS)
    memory_BMD = torch.randn(3, num_slots, SHAPE.d_model, dtype=torch.float64)
    mixer(x_BLD, memory_BMD, mask_BL, torch.ones(3, num_slots, dtype=torch.bool))
    assert set(calls.values()) == {expected}


def test_luna_drops_packing_and_reading_weights_in_training_only() -> None:
    shape = replace(SHAPE, attention_dropout=0.5)
    mixer = LunaAttention(shape, num_packed_heads=3, tie_kv=False).double()
    x_BLD, mask_BL = vectors(*LENGTHS)
    memory_BMD, used_BM = x_BLD[:, :2], torch.ones(3, 2, dtype=torch.bool)
    packed_BMD = mixer.pack(memory_BMD, x_BLD, mask_BL)
    assert not torch.equal(packed_BMD, mixer.pack(memory_BMD, x_BLD, mask_BL))
    y_BLD = mixer.unpack(x_BLD, packed_BMD, used_BM)
    assert not torch.equal(y_BLD, mixer.unpack(x_BLD, packed_BMD, used_BM))
    mixer.eval()
    for run in (
        lambda: mixer.pack(memory_BMD, x_BLD, mask_BL),
        lambda: mixer.unpack(x_BLD, packed_BMD, used_BM),
    ):
        assert torch.equal(run(), run())
    # On average nothing changes.
    exact_BMD = mixer.pack(memory_BMD, x_BLD, mask_BL)
    mixer.train()
    draws = torch.stack([mixer.pack(memory_BMD, x_BLD, mask_BL).detach() for _ in range(2000)])
    error = (draws.mean(dim=0) - exact_BMD) / (draws.std(dim=0) / 2000**0.5)
    assert float(error.detach().abs().max()) < 5


class Weaken(nn.Module):
    """In place of dropout: multiplies by numbers that stay the same for a shape."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return x * torch.rand(x.shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("tie_kv", [True, False], ids=["tied", "untied"])
def test_luna_with_weights_dropped_equals_the_formula(tie_kv: bool) -> None:
    torch.manual_seed(0)
    num_heads, num_slots = 3, 2
    mixer = shaken(LunaAttention(SHAPE, num_packed_heads=num_heads, tie_kv=tie_kv))
    weaken = mixer.dropout = Weaken()
    x_BLD, mask_BL = vectors(*LENGTHS)
    memory_BMD = torch.randn(3, num_slots, SHAPE.d_model, dtype=torch.float64, requires_grad=True)
    used_BM = torch.tensor([[True, True], [True, True], [True, False]])
    leaves = [x_BLD, memory_BMD, *mixer.parameters()]

    def heads(x_BLD: Tensor) -> Tensor:
        return x_BLD.unflatten(2, (num_heads, -1)).transpose(1, 2)

    def weights(q_BHLK: Tensor, k_BHNK: Tensor, mask_BN: Tensor) -> Tensor:
        score_BHLN = q_BHLK @ k_BHNK.mT / q_BHLK.shape[3] ** 0.5
        return score_BHLN.masked_fill(~mask_BN[:, None, None], -torch.inf).softmax(dim=-1)

    packed_BMD = mixer.pack(memory_BMD, x_BLD, mask_BL)
    ours = with_gradients(mixer.unpack(x_BLD, packed_BMD, used_BM), *leaves)

    parts = mixer.pack_kv(x_BLD).chunk(1 if tie_kv else 2, dim=2)
    weight_BHMN = weights(heads(mixer.pack_query(memory_BMD)), heads(parts[0]), mask_BL)
    weight_BHMN = weaken(weight_BHMN.flatten(1, 2)).unflatten(1, (num_heads, num_slots))
    packed_BMD = (weight_BHMN @ heads(parts[-1])).transpose(1, 2).flatten(2)
    parts = mixer.kv(packed_BMD).chunk(1 if tie_kv else 2, dim=2)
    weight_BHLM = weights(heads(mixer.query(x_BLD)), heads(parts[0]), used_BM)
    weight_BHLM = weaken(weight_BHLM.transpose(1, 2)).transpose(1, 2)
    y_BLD = mixer.out((weight_BHLM @ heads(parts[-1])).transpose(1, 2).flatten(2))
    theirs = with_gradients(y_BLD, *leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert largest_difference(a, b) < 1e-9


# Fastformer: for products and shared values, in rows longer than the width.


@pytest.mark.parametrize("output_projection", [True, False])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_fastformer_with_maps_multiplied_first(
    bias: bool, output_projection: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shape = replace(SHAPE, attention_bias=bias)
    mixer = shaken(FastformerAttention(shape, output_projection=output_projection))
    x_BLD, mask_BL = vectors(*LENGTHS)
    leaves = [x_BLD, *mixer.parameters()]
    calls = count_calls(monkeypatch, FastformerAttention, "finish_plain")
    ours = with_gradients(mixer(x_BLD, mask_BL)[mask_BL], *leaves)
    assert calls == {"finish_plain": 1}
    naive = with_gradients(fastformer_attention(mixer, x_BLD, mask_BL)[mask_BL], *leaves)
    mixer.is_plain = False
    general = with_gradients(mixer(x_BLD, mask_BL)[mask_BL], *leaves)
    assert calls == {"finish_plain": 1}
    for a, b, c in zip(ours, naive, general, strict=True):
        assert largest_difference(a, b) < 1e-9
        assert largest_difference(a, c) < 1e-9


@pytest.mark.parametrize(
    ("length", "knobs", "expected"),
    [
        (13, {}, 1),
        (12, {}, 0),
        (13, {"share_qv": False}, 0),
        (13, {"interaction": "add"}, 0),
        (13, {"interaction": "concat"}, 0),
    ],
)
def test_fastformer_takes_it_where_it_holds_and_pays(
    length: int, knobs: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, FastformerAttention, "finish_plain")
    FastformerAttention(SHAPE, **knobs).double()(*vectors(length, 5))
    assert calls == {"finish_plain": expected}


# Both.


def luna(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Tensor]]:
    mixer = shaken(LunaAttention(SHAPE, num_packed_heads=3, tie_kv=False)).to(dtype)
    memory_BMD = torch.randn(3, 4, SHAPE.d_model).to(dtype)
    used_BM = torch.ones(3, 4, dtype=torch.bool)
    return mixer, lambda x, mask: mixer(x, memory_BMD.to(x.dtype), mask, used_BM)[0]


def fastformer(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Tensor]]:
    mixer = shaken(FastformerAttention(SHAPE)).to(dtype)
    return mixer, mixer


@pytest.mark.parametrize("make", [luna, fastformer])
def test_low_precision_and_autocast_are_near(make: Any) -> None:
    torch.manual_seed(0)
    mixer, run = make(torch.float32)
    x_BLD, mask_BL = vectors(40, 13, 0)
    x_BLD = x_BLD.detach().float()
    exact_BLD = run(x_BLD, mask_BL)
    with torch.autocast("cpu", torch.bfloat16):
        y_BLD = run(x_BLD, mask_BL)
        y_BLD.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in mixer.parameters())
    assert y_BLD.dtype == torch.bfloat16 and y_BLD.isfinite().all()
    assert largest_difference(y_BLD.float()[mask_BL], exact_BLD[mask_BL]) < 0.05
    for dtype in (torch.bfloat16, torch.float16):
        mixer.to(dtype)
        y_BLD = run(x_BLD.to(dtype), mask_BL)
        assert y_BLD.dtype == dtype and y_BLD.isfinite().all()
        assert largest_difference(y_BLD.float()[mask_BL], exact_BLD[mask_BL]) < 0.05


@pytest.mark.parametrize("make", [luna, fastformer])
def test_padding_reaches_no_real_row(make: Any) -> None:
    torch.manual_seed(0)
    _, run = make(torch.float64)
    x_BLD, mask_BL = vectors(40, 13, 0)
    before_BLD = run(x_BLD, mask_BL)
    assert before_BLD.isfinite().all()
    other_BLD = torch.where(mask_BL[..., None], x_BLD, 7.0)
    assert largest_difference(run(other_BLD, mask_BL)[mask_BL], before_BLD[mask_BL]) < 1e-12
