"""Fastformer: naive version, options, sharing between layers, masks, scale and precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.classifier import Classifier
from models.encoder import make_encoder
from models.fastformer import FastformerAttention, FastformerEncoder
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.references.fastformer import fastformer_attention

SMALL = Shape(vocab_size=9, max_length=64, d_model=12, num_heads=2, num_layers=3)


def mixer(shape: Shape = SMALL, *, seed: int = 0, **knobs: Any) -> FastformerAttention:
    """Large score vectors, so that weights are far from uniform."""
    torch.manual_seed(seed)
    model = FastformerAttention(shape, **knobs).double()
    with torch.no_grad():
        model.query_score.weight.mul_(8)
        model.key_score.weight.mul_(8)
    return model


def batch(*lengths: int, length: int | None = None, d_model: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(len(lengths), length, d_model, dtype=torch.float64)
    return x_BLD, torch.arange(length) < torch.tensor(lengths)[:, None]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "add": {"interaction": "add"},
    "concat": {"interaction": "concat"},
    "own_values": {"share_qv": False},
    "own_values_add": {"share_qv": False, "interaction": "add"},
    "own_values_concat": {"share_qv": False, "interaction": "concat"},
    "no_output_projection": {"output_projection": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    model = mixer(**OPTIONS[name])
    x_BLD, mask_BL = batch(14, 9, 5, 1)
    mask_BL[1, [0, 4, 5]] = False  # holes
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD = model(x_BLD, mask_BL)
    naive_BLD = fastformer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-10, atol=1e-11)
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [{"head_dim": 7}, {"attention_bias": False}, {"num_heads": 3}])
def test_equals_the_naive_version_in_other_shapes(shape: dict[str, Any]) -> None:
    model = mixer(Shape(**{"vocab_size": 9, "max_length": 64, "d_model": 12} | shape))
    x_BLD, mask_BL = batch(12, 9, 2)
    naive_BLD = fastformer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(model(x_BLD, mask_BL)[mask_BL], naive_BLD[mask_BL])


@pytest.mark.parametrize("name", ["add", "concat", "own_values", "no_output_projection"])
def test_every_option_changes_the_output(name: str) -> None:
    one, other = mixer(), mixer(**OPTIONS[name])
    mine = other.state_dict()
    mine |= {k: v for k, v in one.state_dict().items() if k in mine and v.shape == mine[k].shape}
    other.load_state_dict(mine)
    x_BLD, mask_BL = batch(14, 9)
    assert (one(x_BLD, mask_BL) - other(x_BLD, mask_BL))[mask_BL].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("shape", "knobs", "message"),
    [
        ({}, {"interaction": "sum"}, "interaction='sum': expected one of product, add, concat"),
        ({}, {"causal": True}, "causal=true: .* sums over all tokens"),
        ({}, {"norm_eps": 0.0}, "norm_eps=0.0: expected more than 0"),
        ({}, {"norm_eps": 1e-50}, "norm_eps=1e-50: expected more than 0, from 1.2e-38"),
        ({}, {"norm_eps": float("nan")}, "norm_eps=nan: expected more than 0"),
        ({}, {"norm_eps": float("inf")}, "norm_eps=inf: expected more than 0"),
        (
            {"head_dim": 5},
            {"output_projection": False},
            "output_projection=false: .* 2 \\* 5 and 8",
        ),
    ],
)
def test_refuses(shape: dict[str, Any], knobs: dict[str, Any], message: str) -> None:
    sizes = Shape(**{"vocab_size": 9, "max_length": 9, "d_model": 8, "num_heads": 2} | shape)
    with pytest.raises(ValueError, match=message):
        FastformerEncoder(sizes, **knobs)


def test_neither_padding_nor_neighbours_change_a_row() -> None:
    model = mixer()
    lengths = [20, 13, 5, 1]
    x_BLD, mask_BL = batch(*lengths)
    together_BLD = model(x_BLD, mask_BL)
    filled_BLD = x_BLD.masked_fill(~mask_BL[..., None], 1e3)
    torch.testing.assert_close(model(filled_BLD, mask_BL)[mask_BL], together_BLD[mask_BL])
    for row, length in enumerate(lengths):
        for padding in (0, 1, 40):
            alone_1LD = F.pad(x_BLD[row : row + 1, :length], (0, 0, 0, padding), value=5.0)
            mask_1L = (torch.arange(length + padding) < length)[None]
            alone_LD = model(alone_1LD, mask_1L)[0, :length]
            torch.testing.assert_close(alone_LD, together_BLD[row, :length])


def test_row_of_padding_has_no_weights() -> None:
    score_BLH = torch.randn(2, 7, 3)
    weights_BHL = mixer().weights(score_BLH, batch(7, 0)[1])
    torch.testing.assert_close(weights_BHL.sum(dim=-1), torch.tensor([[1.0] * 3, [0.0] * 3]))


def test_weights_are_over_tokens_and_output_does_not_grow_with_length() -> None:
    shape = Shape(vocab_size=9, max_length=4096)
    torch.manual_seed(2)
    model = FastformerAttention(shape)
    largest = {}
    for length in (256, 4096):
        x_BLD, mask_BL = torch.randn(2, length, 64), torch.arange(length) < length - 9
        mask_BL = mask_BL.expand(2, -1)
        weights_BHL = model.weights(model.query_score(model.query(x_BLD)), mask_BL)
        assert weights_BHL.shape == (2, 2, length)
        assert (weights_BHL.sum(dim=-1) - 1).abs().max() < 1e-4
        assert (weights_BHL[..., -9:] == 0).all()
        y_BLD = model(x_BLD, mask_BL)
        assert y_BLD.isfinite().all()
        largest[length] = float(y_BLD.detach().std())
    assert largest[4096] < 2 * largest[256]


@pytest.mark.parametrize("interaction", ["product", "add", "concat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_inputs_stay_finite(dtype: torch.dtype, interaction: str) -> None:
    model = mixer(interaction=interaction).to(dtype)
    x_BLD, mask_BL = batch(40, 17, 1, 0)
    x_BLD = (50 * x_BLD).to(dtype).requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    assert y_BLD.isfinite().all()
    gradients = torch.autograd.grad(y_BLD.sum(), [x_BLD, *model.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_with_padding_is_finite_and_close(dtype: torch.dtype) -> None:
    model = mixer().float()
    x_BLD, mask_BL = batch(40, 17, 3, 0)
    x_BLD = x_BLD.float()
    expected = model(x_BLD, mask_BL)[mask_BL]
    with torch.autocast("cpu", dtype=dtype):
        cast_BLD = model(x_BLD, mask_BL)
    whole_BLD = model.to(dtype)(x_BLD.to(dtype), mask_BL)
    for y_BLD in (cast_BLD, whole_BLD):
        assert y_BLD.dtype == dtype
        assert y_BLD.isfinite().all()
        assert (y_BLD[mask_BL].float() - expected).abs().max() < 0.05


@pytest.mark.parametrize("pooling", ["mean", "attention"])
def test_row_of_padding_gives_logits_that_ignore_its_tokens(pooling: Any) -> None:
    shape = Shape(vocab_size=9, max_length=20, d_model=12, num_heads=2, pooling=pooling)
    torch.manual_seed(3)
    model = Classifier(FastformerEncoder(shape), shape, num_classes=3).train()
    tokens_BSL = torch.randint(0, 9, (3, 1, 20))
    lengths_BS = torch.tensor([[0], [0], [20]])
    logits_BC = model(tokens_BSL, lengths_BS)
    assert logits_BC.isfinite().all()
    torch.testing.assert_close(logits_BC[0], logits_BC[1])
    gradients = torch.autograd.grad(logits_BC.sum(), list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_share_layers_has_one_mixer_in_memory_and_in_checkpoints() -> None:
    torch.manual_seed(4)
    own, shared = FastformerEncoder(SMALL), FastformerEncoder(SMALL, share_layers=True)
    mixer_size = sum(p.numel() for p in own.get_submodule("blocks.0.mixer").parameters())
    sizes = [sum(parameter.numel() for parameter in m.parameters()) for m in (own, shared)]
    assert sizes[0] - sizes[1] == 2 * mixer_size
    state = shared.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    assert not any(name.startswith("blocks.1.mixer") for name in state)

    # As an encoder whose layers own equal copies: same output, and the sum of their gradients.
    copies = dict(state)
    for name, value in state.items():
        if name.startswith("blocks.0.mixer"):
            copies |= {name.replace("blocks.0", f"blocks.{i}"): value for i in (1, 2)}
    own.load_state_dict(copies)
    tokens_BL, mask_BL = torch.randint(1, 9, (2, 10)), torch.ones(2, 10, dtype=torch.bool)
    outputs = []
    for model in (own, shared):
        outputs.append(model.eval()(tokens_BL, mask_BL))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    gradients = [own.get_parameter(f"blocks.{i}.mixer.key.weight").grad for i in range(3)]
    summed = shared.get_parameter("blocks.0.mixer.key.weight").grad
    torch.testing.assert_close(sum(gradients), summed)

    other = FastformerEncoder(SMALL, share_layers=True).eval()
    other.load_state_dict(state)
    torch.testing.assert_close(other(tokens_BL, mask_BL), outputs[1])
    twin = copy.deepcopy(shared).double()
    with torch.no_grad():
        twin.get_parameter("blocks.0.mixer.key.weight").zero_()
    torch.testing.assert_close(shared(tokens_BL, mask_BL), outputs[1])
    assert (twin(tokens_BL, mask_BL) - outputs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["layer", "batch", "scale", "rms"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_norm_eps_reaches_every_norm(norm: Any, kind: Any) -> None:
    shape = Shape(vocab_size=9, max_length=20, norm=norm, norm_kind=kind, embedding_norm=True)
    model = FastformerEncoder(shape, norm_eps=1e-12)
    epsilons = [part.eps for part in model.modules() if hasattr(part, "eps")]
    assert epsilons == [1e-12] * (6 if norm == "pre" else 5)


def test_parameters_are_within_one_percent_of_softmax() -> None:
    shape = Shape(vocab_size=32, max_length=2048)
    fastformer, softmax = (
        Classifier(make_encoder(target, shape), shape, num_classes=10)
        for target in (FastformerEncoder, SoftmaxAttention)
    )
    sizes = [sum(p.numel() for p in model.parameters()) for model in (fastformer, softmax)]
    # One score vector per head for the global query and one for the global key, two layers.
    assert sizes[0] == sizes[1] + 2 * 2 * 2 * 64
    assert sizes[1] == 209_802
