"""S4D: naive version, options, steps, initial values, groups of parameters, dropout, precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lra.training.optim import parameter_groups
from models.classifier import Classifier
from models.dropout import TiedDropout
from models.encoder import MixerBlock, make_encoder
from models.s4d import S4DEncoder, S4DMixer, initial_states
from models.shape import Shape
from tests.models.test_models import count_saved_bytes
from tests.references.s4d import s4d_kernels, s4d_mixer

SMALL = Shape(vocab_size=9, max_length=64, d_model=12, d_ff=16, dropout=0.0)
ONE_WAY: dict[str, Any] = {"bidirectional": False}


def encoder(shape: Shape = SMALL, *, seed: int = 0, **knobs: Any) -> S4DEncoder:
    torch.manual_seed(seed)
    model = make_encoder(S4DEncoder, shape, **{"state_size": 8} | knobs)
    assert isinstance(model, S4DEncoder)
    return model


def mixer(shape: Shape = SMALL, **knobs: Any) -> S4DMixer:
    """In float64, with step sizes large enough that states come and go within a short row."""
    model = encoder(shape, **knobs).blocks[0].mixer.double()
    with torch.no_grad():
        model.kernel.raw_dt += 2.0
        model.kernel.A_real += 0.3 * torch.randn_like(model.kernel.A_real)
        model.kernel.B += 0.3 * torch.randn_like(model.kernel.B)
    return model


def batch(*lengths: int, width: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x_BLD = torch.randn(len(lengths), max(lengths), width, dtype=torch.float64)
    return x_BLD, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "lin": {"init": "lin"},
    "inv": {"init": "inv"},
    "bilinear": {"discretization": "bilinear"},
    "relu": {"real_part": "relu"},
    "exp_dt": {"dt_transform": "exp"},
    "own_dt": {"tie_dt": False},
    "own_dt_bilinear": {"tie_dt": False, "discretization": "bilinear"},
    "one_copy": {"num_copies": 1},
    "four_copies": {"num_copies": 4},
    "channels": {"channels": 3},
    "one_way_channels": {"channels": 2, "bidirectional": False},
    "short": {"kernel_length": 5},
    "one_tap": {"kernel_length": 1, "channels": 2},
    "one_way": ONE_WAY,
    "short_one_way": {"kernel_length": 5, "bidirectional": False},
    "longer_than_input": {"kernel_length": 50},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    model = mixer(**OPTIONS[name])
    x_BLD, mask_BL = batch(17, 9, 1)
    mask_BL[0, [0, 4, 5]] = False  # holes
    x_BLD.requires_grad_()
    results = []
    for y_BLD in (model(x_BLD, mask_BL), s4d_mixer(model, x_BLD, mask_BL)):
        gradients = torch.autograd.grad(y_BLD.square().sum(), [x_BLD, *model.parameters()])
        results.append([y_BLD, *gradients])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    assert all(gradient.abs().max() > 1e-6 for gradient in results[0])


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"default"}))
def test_every_option_changes_something(name: str) -> None:
    x_BLD, mask_BL = batch(17)
    plain, changed = mixer(), mixer(**OPTIONS[name])
    if name == "longer_than_input":
        assert torch.equal(changed(x_BLD, mask_BL), plain(x_BLD, mask_BL))
    else:
        assert (changed(x_BLD, mask_BL) - plain(x_BLD, mask_BL)).abs().max() > 1e-3


def test_what_stands_at_padding_is_zero_to_the_mixer_and_gets_no_gradient() -> None:
    model = mixer()
    x_BLD, mask_BL = batch(17, 9)
    y_BLD = model(x_BLD, mask_BL)
    spoilt_BLD = x_BLD.masked_fill(~mask_BL[..., None], torch.inf).requires_grad_()
    spoilt_y_BLD = model(spoilt_BLD, mask_BL)
    assert torch.equal(spoilt_y_BLD, y_BLD)
    (gradient,) = torch.autograd.grad(spoilt_y_BLD.sum(), spoilt_BLD)
    assert not gradient[~mask_BL].any() and gradient.isfinite().all()
    torch.testing.assert_close(y_BLD[1:, :9], model(x_BLD[1:, :9], mask_BL[1:, :9]))


# One direction, all at once and by steps.


@pytest.mark.parametrize("name", ["one_way", "one_way_channels", "own_dt", "relu", "four_copies"])
def test_steps_equal_the_whole_row(name: str) -> None:
    model = mixer(**OPTIONS[name] | ONE_WAY)
    x_BLD, mask_BL = batch(40, 40)
    state = model.start(batch_size=2)
    size = state.x_BDN.shape
    rows = []
    for t in range(40):
        y_B1D, state = model.step(x_BLD[:, t : t + 1], state)
        rows.append(y_B1D)
        assert state.x_BDN.shape == size  # nothing grows
    torch.testing.assert_close(torch.cat(rows, dim=1), model(x_BLD, mask_BL), rtol=0, atol=1e-10)


def test_steps_in_low_precision_carry_a_state_in_float32() -> None:
    model = mixer(**ONE_WAY).bfloat16()
    x_BLD, mask_BL = batch(30)
    state, rows = model.start(batch_size=1), []
    for t in range(30):
        y_B1D, state = model.step(x_BLD[:, t : t + 1].bfloat16(), state)
        rows.append(y_B1D)
    assert state.x_BDN.dtype == torch.complex64 and rows[0].dtype == torch.bfloat16
    y_BLD = model(x_BLD.bfloat16(), mask_BL)
    assert (torch.cat(rows, dim=1) - y_BLD).abs().max() < 0.02 * y_BLD.abs().max()


def test_no_steps_where_a_state_does_not_say_it_all() -> None:
    with pytest.raises(ValueError, match="model.bidirectional=true"):
        mixer().start(1)
    with pytest.raises(ValueError, match="model.kernel_length=63 .*shape.max_length=64"):
        mixer(kernel_length=63, **ONE_WAY).start(1)
    mixer(kernel_length=64, **ONE_WAY).start(1)


@pytest.mark.parametrize("block", ["shared", "own"])
def test_one_direction_is_causal_and_two_are_not(block: str) -> None:
    tokens_BL = torch.arange(40)[None] % 8 + 1
    other_BL = tokens_BL.clone()
    other_BL[0, 25] = 8
    mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
    for knobs in (ONE_WAY, ONE_WAY | {"causal": True}, {}):
        model = encoder(block=block, **knobs).double().eval()
        change_L = (model(tokens_BL, mask_BL) - model(other_BL, mask_BL))[0].abs().amax(dim=1)
        assert (change_L[25:] > 1e-9).all()
        assert (change_L[:25] < 1e-13).all() if knobs else (change_L[:25] > 1e-9).all()


def test_causal_and_one_way_models_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="model.causal=true with model.bidirectional=true"):
        encoder(causal=True)
    for pooling in ("cls", "first"):
        shape = replace(SMALL, pooling=pooling)
        with pytest.raises(ValueError, match=f"causal=true with shape.pooling={pooling}"):
            encoder(shape, causal=True, **ONE_WAY)
        with pytest.raises(ValueError, match=f"bidirectional=false with shape.pooling={pooling}"):
            encoder(shape, **ONE_WAY)
        encoder(shape)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("state_size", 0, "model.state_size=0"),
        ("state_size", 7, "model.state_size=7: .*even"),
        ("init", "hippo", "model.init='hippo': .*legs, lin, inv"),
        ("discretization", "euler", "model.discretization='euler': .*zoh, bilinear"),
        ("real_part", "abs", "model.real_part='abs': .*exp, relu"),
        ("dt_transform", "none", "model.dt_transform='none': .*softplus, exp"),
        ("dt_min", 0.0, "model.dt_min=0.0"),
        ("dt_min", 1e-60, "model.dt_min=1e-60: expected more than 0, from 1.2e-38"),
        ("dt_min", 0.1, "model.dt_min=0.1 with model.dt_max=0.1"),
        ("dt_max", math.inf, "model.dt_max=inf"),
        ("num_copies", 0, "model.num_copies=0"),
        ("num_copies", 5, "model.num_copies=5 does not divide shape.d_model=12"),
        ("channels", 0, "model.channels=0"),
        ("kernel_length", 0, "model.kernel_length=0"),
        ("block", "mine", "model.block='mine': .*shared or own"),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        encoder(**{key: value})


# Initial values.


def test_initial_values_are_the_sources() -> None:
    shape = replace(SMALL, d_model=1024, num_heads=1)
    kernel = encoder(shape, state_size=16, channels=2).blocks[0].mixer.kernel
    dt = torch.nn.functional.softplus(kernel.raw_dt.detach())
    assert dt.shape == (1024, 1) and 0.001 <= dt.min() < 0.0011 and 0.09 < dt.max() <= 0.1001
    assert float(dt.log().mean()) == pytest.approx(math.log(0.01), abs=0.1)
    assert torch.equal(kernel.A_real, torch.full((1024, 8), math.log(0.5)))
    assert kernel.C.shape == (4, 1024, 8, 2)
    for part in kernel.C.detach().unbind(-1):
        assert float(part.var()) == pytest.approx(0.5, rel=0.03)
    skip = encoder(shape, channels=2).blocks[0].mixer.skip
    assert skip.shape == (2, 1024) and float(skip.detach().var()) == pytest.approx(1.0, rel=0.1)

    untied = encoder(shape, tie_dt=False, dt_transform="exp", dt_min=0.01, dt_max=0.02)
    dt = untied.blocks[0].mixer.kernel.raw_dt.detach().exp()
    assert dt.shape == (1024, 4) and 0.00999 < dt.min() < 0.0101 and 0.0199 < dt.max() < 0.02001

    kernel = encoder(init="lin", real_part="relu", num_copies=3).blocks[0].mixer.kernel
    expected_N = torch.tensor([1e-4, math.pi, 2 * math.pi, 3 * math.pi])
    torch.testing.assert_close(kernel.A_imag.data, expected_N.expand(3, 4))
    assert torch.equal(kernel.A_real.data, torch.full((3, 4), 0.5))
    assert torch.equal(kernel.B.data, torch.tensor([1.0, 0.0]).expand(3, 4, 2))


def test_legs_are_eigenvalues_of_the_hippo_matrix() -> None:
    size = 12
    n_I = torch.arange(size, dtype=torch.float64)
    root_I = (2 * n_I + 1).sqrt()
    hippo_II = -(root_I[:, None] * root_I).tril(-1) - torch.diag(n_I + 1)
    low_rank_I = (n_I + 0.5).sqrt()
    normal_II = hippo_II + low_rank_I[:, None] * low_rank_I
    eigenvalue_I, vector_II = torch.linalg.eig(normal_II)
    torch.testing.assert_close(eigenvalue_I.real, torch.full((size,), -0.5, dtype=torch.float64))
    frequency_N, b_N = initial_states("legs", size)
    expected_N = eigenvalue_I.imag[eigenvalue_I.imag > 0].sort(descending=True).values
    torch.testing.assert_close(frequency_N, expected_N)
    order_N = eigenvalue_I.imag.argsort()[: size // 2]  # the negative ones, most negative first
    expected_N = vector_II[:, order_N].mH @ root_I.to(vector_II.dtype)
    torch.testing.assert_close(b_N.abs()[2:], expected_N.abs()[2:])
    assert (b_N.imag.abs() <= 2).all() and b_N.imag[0] == 2  # cut
    assert (b_N.real > 0).all() and torch.equal(initial_states("legs", size)[1], b_N)


def test_parameters_that_learn_at_their_own_rate() -> None:
    model = encoder(block="own", channels=2)
    groups = parameter_groups(Classifier(model, SMALL, 3))
    kernels = [block.mixer.kernel for block in model.blocks]
    expected = {
        "step": {k.raw_dt for k in kernels},
        "state": {k.A_real for k in kernels} | {k.A_imag for k in kernels},
        "input": {k.B for k in kernels},
        "output": {k.C for k in kernels},
    }
    for name, parameters in expected.items():
        assert set(groups[name]) == parameters, name
    assert {block.mixer.skip for block in model.blocks} <= set(groups["general"])


# The authors' layer, and dropout.


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_an_own_layer_is_a_mixer_with_a_residual_connection_and_a_norm(norm: Any) -> None:
    model = encoder(replace(SMALL, norm=norm, norm_kind="batch"), block="own").double().eval()
    block = model.blocks[0]
    assert isinstance(block, MixerBlock)
    assert {key.split(".")[0] for key, _ in block.named_parameters()} == {"norm", "mixer"}
    with torch.no_grad():
        block.norm.running_mean += 1.0
        block.norm.bias += 0.5
    x_BLD, mask_BL = batch(9, 4)
    y_BLD = block(x_BLD, mask_BL)
    if norm == "pre":
        expected_BLD = x_BLD + block.mixer(block.norm(x_BLD, mask_BL), mask_BL)
    else:
        expected_BLD = block.norm(x_BLD + block.mixer(x_BLD, mask_BL), mask_BL)
    assert torch.equal(y_BLD, expected_BLD)
    # Padding is zero to the convolution behind the norm, whose shift it would carry.
    torch.testing.assert_close(y_BLD[1:, :4], block(x_BLD[1:, :4], mask_BL[1:, :4]))


def test_a_mask_for_all_positions_drops_whole_features() -> None:
    torch.manual_seed(0)
    dropout = TiedDropout(0.4).train()
    x_BLD = torch.ones(50, 6, 20)
    y_BLD = dropout(x_BLD)
    assert torch.equal(y_BLD, y_BLD[:, :1].expand_as(y_BLD))
    assert float((y_BLD[:, 0] == 0).double().mean()) == pytest.approx(0.4, abs=0.05)
    assert float(y_BLD.max()) == pytest.approx(1 / 0.6, rel=1e-4)
    assert dropout.eval()(x_BLD) is x_BLD


@pytest.mark.parametrize("tie_dropout", [True, False])
def test_dropout_stands_before_and_behind_the_gelu_and_on_the_branch(tie_dropout: bool) -> None:
    shape = replace(SMALL, dropout=0.3)
    block = encoder(shape, block="own", tie_dropout=tie_dropout).double().train().blocks[0]
    seen: dict[str, Tensor] = {}
    for name, part in block.named_modules():
        if name.endswith("dropout"):
            assert part.p == 0.3
            part.register_forward_hook(lambda _, args, y, name=name: seen.update({name: y}))
    x_BLD, mask_BL = batch(30, 30)
    block(x_BLD, mask_BL)
    dropped = {name: (y_BLD == 0).double() for name, y_BLD in seen.items()}
    assert dropped.keys() == {"mixer.inner_dropout", "mixer.dropout", "dropout"}
    assert 0.2 < dropped["mixer.inner_dropout"].mean() < 0.4
    assert (dropped["mixer.inner_dropout"].mean(dim=1) < 1).all()  # each position for itself
    # What the first has dropped is zero behind the gelu, too; of the rest whole features go.
    whole = (dropped["mixer.dropout"].mean(dim=1) == 1).any()
    assert whole == tie_dropout
    assert (dropped["dropout"].mean(dim=1) == 1).any() == tie_dropout
    assert dropped["dropout"].any()


# Precision and size.


@pytest.mark.parametrize("dt_min, largest_error", [(1e-3, 2e-4), (1e-4, 6e-4)])
def test_long_kernels_in_float32_are_as_near_to_float64_as_is_said(
    dt_min: float, largest_error: float
) -> None:
    model = encoder(replace(SMALL, d_model=32), state_size=64, dt_min=dt_min)
    kernel = model.blocks[0].mixer.kernel
    with torch.no_grad():
        taps_MDK, exact_MDK = kernel(16_384), kernel.double()(16_384)
    assert taps_MDK.dtype == torch.float32
    error_MD = (taps_MDK - exact_MDK).norm(dim=2) / exact_MDK.norm(dim=2)
    assert float(error_MD.max()) < largest_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_in_low_precision_are_formed_in_float32(dtype: torch.dtype) -> None:
    kernel = encoder(state_size=32).blocks[0].mixer.kernel.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        kernel_MDK = kernel(512)
    assert kernel_MDK.dtype == torch.float32
    exact_MDK = kernel.double()(512)  # of the rounded parameters
    assert (kernel_MDK - exact_MDK).abs().max() < 1e-5 * exact_MDK.abs().max()


@pytest.mark.parametrize("name", ["default", "bilinear", "relu", "channels"])
def test_kernels_are_sums_over_all_powers(name: str) -> None:
    model = mixer(**OPTIONS[name])
    for length in (1, 2, 63, 64, 200):
        torch.testing.assert_close(model.kernel(length), s4d_kernels(model, length))


def test_powers_of_all_states_at_all_positions_are_never_formed() -> None:
    kernel = encoder(replace(SMALL, d_model=4, num_heads=1), state_size=64).blocks[0].mixer.kernel
    with count_saved_bytes() as saved:
        kernel(4096)
    assert saved[0] < 8 * 4 * 32 * 4096 / 4
