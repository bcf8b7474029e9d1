"""Rotary positions: the angles, who turns by them and who refuses.

A new model is tested by its yaml alone, whether it turns its queries and keys or not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.encoder import make_encoder
from models.linear import EPSILON, LinearAttention
from models.linformer import LinformerAttention
from models.longformer import LongformerAttention
from models.performer import PerformerAttention
from models.positions import Rotary, make_table
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.models.test_models import MODELS, SMALL, batch, build, largest_difference

# Heads of 12: three rates for each axis of a picture, and a root that is no constant of the code.
SHAPE = replace(SMALL, d_model=24, positions="rotary", rotary_theta=100.0, picture_width=7)
# Of our own models those that have to.
TURNS = {"softmax", "local", "longformer", "bigbird", "sparse", "linear", "performer"}
TURNS |= {"nystromformer", "linformer", "sinkhorn", "reformer", "synthesizer"}
CASES = [(name, positions) for name in MODELS for positions in ("rotary", "rotary_2d")]
KNOBS: dict[str, dict[str, Any]] = {"synthesizer": {"dot_product": True}}


def naive(x_BHLK: Tensor, shape: Shape = SHAPE, first: int = 0) -> Tensor:
    """Every number by itself, as a complex one."""
    turned, is_cls = torch.empty_like(x_BHLK), shape.pooling == "cls"
    width = x_BHLK.shape[3]
    for n in range(x_BHLK.shape[2]):
        for r in range(width // 2):
            position, num_rates, i = first + n, width // 2, r
            if shape.positions == "rotary_2d":
                num_rates, i = width // 4, r % (width // 4)
                row, column = divmod(first + n - is_cls, 7) if first + n >= is_cls else (-1, -1)
                position = row if r < num_rates else column
            angle = position * torch.tensor(shape.rotary_theta).double() ** (-i / num_rates)
            pair = torch.complex(x_BHLK[:, :, n, 2 * r], x_BHLK[:, :, n, 2 * r + 1])
            pair = pair * torch.polar(torch.ones_like(angle), angle)
            turned[:, :, n, 2 * r], turned[:, :, n, 2 * r + 1] = pair.real, pair.imag
    return turned


def heads(length: int = 20, *, requires_grad: bool = False) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 2, length, 12, dtype=torch.float64, requires_grad=requires_grad)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("positions", ["rotary", "rotary_2d"])
def test_equals_its_naive_version_with_gradients(positions: Any, pooling: Any) -> None:
    shape = replace(SHAPE, positions=positions, pooling=pooling)
    rotary, x_BHLK = Rotary(shape), heads(requires_grad=True)
    (y_BHLK,) = rotary(x_BHLK)
    torch.testing.assert_close(y_BHLK, naive(x_BHLK, shape), rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(y_BHLK)
    ours, theirs = (
        torch.autograd.grad((y * weight).sum(), x_BHLK)[0] for y in (y_BHLK, naive(x_BHLK, shape))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # Other ways to say which rows: later ones, some, and in a tensor of several parts.
    torch.testing.assert_close(rotary(x_BHLK[:, :, 5:], first=5)[0], y_BHLK[:, :, 5:])
    index_M = torch.tensor([7, 0, 19])
    torch.testing.assert_close(rotary.at(x_BHLK[:, :, index_M], index_M), y_BHLK[:, :, index_M])
    x_BLTHK = torch.stack([x_BHLK, x_BHLK], dim=2).permute(0, 3, 2, 1, 4)
    turned, as_it_was = rotary.stacked(x_BLTHK, 1).unbind(2)
    torch.testing.assert_close(turned.transpose(1, 2), y_BHLK)
    assert torch.equal(as_it_was.transpose(1, 2), x_BHLK)


def test_products_depend_on_the_distance_alone() -> None:
    q_BHLK, k_BHLK = heads(), heads().flip(0)
    near, far = (
        q @ k.mT for q, k in (Rotary(SHAPE)(q_BHLK, k_BHLK, first=first) for first in (0, 1000))
    )
    torch.testing.assert_close(far, near, rtol=1e-9, atol=1e-9)
    assert largest_difference(near, q_BHLK @ k_BHLK.mT) > 0.1
    other = Rotary(replace(SHAPE, rotary_theta=1e4))(q_BHLK, k_BHLK)
    assert largest_difference(other[0] @ other[1].mT, near) > 0.1
    # In a picture: rows and columns, wherever its pixels are.
    rotary = Rotary(replace(SHAPE, positions="rotary_2d"))
    q_BHLK, k_BHLK = rotary(q_BHLK[:, :, :1].expand(-1, -1, 20, -1), k_BHLK)
    k_BHLK = rotary(heads()[:, :, :1].expand(-1, -1, 20, -1))[0]
    score_BHLL = q_BHLK @ k_BHLK.mT
    torch.testing.assert_close(score_BHLL[:, :, 0, 8], score_BHLL[:, :, 10, 18])  # down and right
    assert largest_difference(score_BHLL[:, :, 6, 7], score_BHLL[:, :, 5, 6]) > 0.1


def test_any_layout_and_precision_and_a_table_of_inference_serve() -> None:
    make_table.cache_clear()
    rotary, x_BHLK = Rotary(SHAPE), heads()
    with torch.inference_mode():
        (expected,) = rotary(x_BHLK)
    for x in (
        nn.functional.pad(x_BHLK, (1, 0))[..., 1:],  # no pairs as they lie
        nn.functional.pad(x_BHLK, (2, 2))[..., 2:-2],
        x_BHLK.mT.contiguous().mT,
    ):
        y = rotary(x.requires_grad_())[0]
        torch.testing.assert_close(y, expected)
        y.sum().backward()  # a gradient without strides
    y = rotary(x_BHLK.bfloat16())[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.02)
    long = rotary(heads(300).float())[0]  # longer than the shape says, as filled inputs are
    torch.testing.assert_close(
        long[:, :, 200:], rotary(heads(300)[:, :, 200:].float(), first=200)[0]
    )
    compiled = torch.compile(lambda x: rotary(x)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x_BHLK), expected)


@pytest.mark.parametrize(("name", "positions"), CASES)
def test_models_turn_or_refuse(name: str, positions: Any) -> None:
    pooling: Any = "cls" if positions == "rotary_2d" else "mean"
    shape = replace(SHAPE, positions=positions, pooling=pooling)
    try:
        model = build(name, shape, **KNOBS.get(name, {}))
    except ValueError as error:
        assert f"shape.positions={positions}: " in str(error) and name not in TURNS
        assert "expected learned, sinusoidal or none" in str(error)
        return
    assert model.encoder.embedding.positions is None
    lengths = (5, 40, 1)
    together_BC = model(*batch(*lengths))
    assert largest_difference(model(*batch(*lengths, length=48)), together_BC) < 1e-9
    tokens_BSL, lengths_BS = batch(*lengths)
    for b, n in enumerate(lengths):
        alone_BC = model(tokens_BSL[b : b + 1, :, :n], lengths_BS[b : b + 1])
        assert largest_difference(alone_BC, together_BC[b : b + 1]) < 1e-9
    together_BC.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not any("rotary" in key for key in model.state_dict())
    # Without positions these weights, but for tables, would not mind the order of tokens.
    plain = build(name, replace(shape, positions="none"), **KNOBS.get(name, {}))
    plain.load_state_dict(model.state_dict())
    assert largest_difference(plain(tokens_BSL, lengths_BS)[1], together_BC[1]) > 1e-4


STACKED = sorted(TURNS - {"linear", "linformer"})


@pytest.mark.parametrize("name", STACKED)
def test_mixers_are_their_plain_form_on_turned_queries_and_keys(name: str) -> None:
    knobs: dict[str, Any] = {"longformer": {"num_global": 0}, **KNOBS}.get(name, {})
    mixers = [
        build(name, replace(SHAPE, positions=positions), **knobs).encoder.blocks[0].mixer
        for positions in ("rotary", "none")
    ]
    mixers[1].load_state_dict(mixers[0].state_dict())

    def turn_first(parts: int, num_turned: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output_BLE: Tensor) -> Tensor:
            x_TBHLK = output_BLE.unflatten(2, (parts, 2, 12)).permute(2, 0, 3, 1, 4)
            x_TBHLK = torch.stack(
                [naive(x) if t < num_turned else x for t, x in enumerate(x_TBHLK)]
            )
            return x_TBHLK.permute(1, 3, 0, 2, 4).flatten(2)

        return hook

    for part, args in (
        ("qkv", (3, 2)), ("query_value", (2, 1)), ("query", (1, 1)), ("key", (1, 1)),
    ):  # fmt: skip
        if hasattr(mixers[1], part):
            getattr(mixers[1], part).register_forward_hook(turn_first(*args))
    torch.manual_seed(1)
    x_BLD = torch.randn(2, 40, 24, dtype=torch.float64)
    mask_BL = torch.arange(40) < torch.tensor([[40], [23]])
    ours_BLD, plain_BLD = (mixer(x_BLD, mask_BL) for mixer in mixers)
    assert largest_difference(ours_BLD[mask_BL], plain_BLD[mask_BL]) < 1e-10


def mixer_and_rows(
    target: Any, shape: Shape = SHAPE, length: int = 20, **knobs: Any
) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    mixer = target(shape, **knobs).double()
    x_BLD = torch.randn(2, length, 24, dtype=torch.float64)
    return mixer, x_BLD, torch.arange(length) < torch.tensor([[length], [length - 7]])


@pytest.mark.parametrize("causal", [False, True])
def test_longformers_global_rows_turn_by_their_own_maps(causal: bool) -> None:
    """With all positions global, and one set of maps, it is softmax attention."""
    softmax, x_BLD, mask_BL = mixer_and_rows(SoftmaxAttention, causal=causal)
    mixer, *_ = mixer_and_rows(LongformerAttention, num_global=20, causal=causal)
    for part in ("qkv", "global_qkv", "out"):
        state = getattr(softmax, part.removeprefix("global_")).state_dict()
        getattr(mixer, part).load_state_dict(state)
    ours_BLD, expected_BLD = mixer(x_BLD, mask_BL), softmax(x_BLD, mask_BL)
    assert largest_difference(ours_BLD[mask_BL], expected_BLD[mask_BL]) < 1e-10
    index_M = torch.tensor([13, 2])
    some_BME = mixer.global_rows(x_BLD, mask_BL, index_M)
    assert largest_difference(mixer.out(some_BME)[0], expected_BLD[0, index_M]) < 1e-10


def test_linformer_turns_keys_before_their_table() -> None:
    """With the identity as its table it is softmax attention."""
    softmax, x_BLD, mask_BL = mixer_and_rows(SoftmaxAttention)
    mask_BL[:] = True
    mixer, *_ = mixer_and_rows(LinformerAttention, replace(SHAPE, max_length=20), rank=20)
    with torch.no_grad():
        mixer.table_SGRM[:] = torch.eye(20)
        for part in ("weight", "bias"):
            q, k, v = getattr(softmax.qkv, part).chunk(3)
            getattr(mixer.query, part).copy_(q)
            getattr(mixer.kv, part).copy_(torch.cat([k, v]))
    mixer.out.load_state_dict(softmax.out.state_dict())
    assert largest_difference(mixer(x_BLD, mask_BL), softmax(x_BLD, mask_BL)) < 1e-10


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_turns_features_above_the_line_only(causal: bool) -> None:
    mixer, x_BLD, mask_BL = mixer_and_rows(LinearAttention, causal=causal)
    q, k, v = (x.unflatten(2, (2, 12)).transpose(1, 2) for x in mixer.qkv(x_BLD).chunk(3, dim=-1))
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
    readable = (
        mask_BL[:, None, None] & torch.ones(20, 20).tril().bool()
        if causal
        else mask_BL[:, None, None]
    )
    weight, turned = (x.masked_fill(~readable, 0.0) for x in (q @ k.mT, naive(q) @ naive(k).mT))
    y_BHLK = turned @ v / (weight.sum(dim=-1, keepdim=True) + EPSILON)
    expected_BLD = mixer.out(y_BHLK.transpose(1, 2).flatten(2))
    assert largest_difference(mixer(x_BLD, mask_BL), expected_BLD) < 1e-10


@pytest.mark.parametrize("target", [LinearAttention, PerformerAttention])
def test_steps_count_positions(target: Any) -> None:
    mixer, x_BLD, mask_BL = mixer_and_rows(target, length=70, causal=True)
    state, steps = mixer.start(2), []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = mixer.step(x_B1D, state)
        steps.append(y_B1D)
    expected_BLD = mixer(x_BLD, torch.ones_like(mask_BL))
    assert largest_difference(torch.cat(steps, dim=1), expected_BLD) < 1e-10


class Bag(nn.Module):
    """A mixer of one's own that knows nothing of positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        return x_BLD


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build("local", SHAPE, pattern="strided", window=64),
            "rotary with model.pattern=strided",
        ),
        (lambda: build("synthesizer", SHAPE), "model.dot_product=false: .*dot_product=true"),
        (
            lambda: build("performer", SHAPE, kernel="relu", num_features=None),
            "rotary with model.num_features=null",
        ),
        (
            lambda: Rotary(replace(SHAPE, positions="rotary_2d", picture_width=None)),
            "rotary_2d: needs shape.picture_width",
        ),
        (lambda: replace(SHAPE, head_dim=5), "heads are 5 wide, expected a multiple of 2"),
        (lambda: replace(SHAPE, positions="rotary_2d", head_dim=6), "multiple of 4"),
        (lambda: replace(SHAPE, rotary_theta=0.0), "rotary_theta=0.0: expected a number above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mixer_that_ignores_positions_is_refused() -> None:
    with pytest.raises(
        ValueError, match="rotary: Bag turns no queries and keys .*sinusoidal or none"
    ):
        make_encoder(Bag, SHAPE)
    make_encoder(Bag, SMALL)
