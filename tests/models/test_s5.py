"""S5: naive version under every switch, HiPPO's eigenvalues, initial values, sizes, steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.classifier import Classifier
from models.recurrence import GatedRecurrence
from models.s5 import S5SSM, S5Encoder, hippo_eigenvalues, kept_eigenvalues
from models.shape import Shape
from tests.references.s5 import s5

SMALL = Shape(
    vocab_size=9, max_length=64, d_model=8, d_ff=12, num_heads=1, num_layers=2, dropout=0.0
)


def encoder(shape: Shape = SMALL, *, shake: float = 0.1, **knobs: Any) -> S5Encoder:
    torch.manual_seed(0)
    model = S5Encoder(shape, **{"state_size": 8, "num_blocks": 2, "dt_min": 0.01} | knobs)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shake * torch.randn_like(parameter)
    return model


def mixer(**knobs: Any) -> GatedRecurrence:
    return encoder(**knobs).blocks[0].mixer


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BLD = torch.randn(
        len(lengths), max(lengths), SMALL.d_model, dtype=torch.float64, generator=generator
    )
    return x_BLD, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_direction": {"bidirectional": False},
    "bilinear": {"discretization": "bilinear"},
    "no_conjugates": {"conj_sym": False},
    "one_block": {"num_blocks": 1},
    "rescaled": {"step_rescale": 2.0},
    "trunc_standard_normal": {"c_init": "trunc_standard_normal"},
    "complex_normal": {"c_init": "complex_normal"},
    "full_glu": {"gate": "full_glu"},
    "half_glu2": {"gate": "half_glu2"},
    "gelu": {"gate": "gelu"},
    "dt_max": {"dt_max": 0.5},
    "dt_min": {"dt_min": 0.05},
    "state_size": {"state_size": 16},
}


@pytest.mark.parametrize("name", [*OPTIONS, "clipped"])
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    model = mixer(**OPTIONS.get(name, {"clip_eigs": True}))
    if name == "clipped":
        with torch.no_grad():
            model.system.Lambda_re[:2] = torch.tensor([0.01, -1e-5])
    x_BLD, mask_BL = batch(40, 33, 5, 1, 0)
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD, naive_BLD = model(x_BLD, mask_BL), s5(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-11, atol=1e-11)
    leaves = [x_BLD, *model.parameters()]
    for ours, naive in zip(
        torch.autograd.grad((ours_BLD * weight_BLD).sum(), leaves),
        torch.autograd.grad((naive_BLD * weight_BLD).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-10)
    if name == "clipped":
        assert not model.system.Lambda_re.grad_fn and (ours_BLD.abs() < 1e3).all()
        (gradient,) = torch.autograd.grad(
            model(x_BLD, mask_BL).square().sum(), model.system.Lambda_re
        )
        assert not gradient[:2].any() and gradient[2:].all()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_output(name: str) -> None:
    x_BLD, mask_BL = batch(30)
    difference = mixer(**OPTIONS[name])(x_BLD, mask_BL) - mixer()(x_BLD, mask_BL)
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("gate", ["full_glu", "half_glu1", "half_glu2", "gelu"])
def test_a_branch_without_a_map_is_dropped_once(gate: Any) -> None:
    model = mixer(shape=replace(SMALL, dropout=0.5), gate=gate)
    assert model.dropout.p == (0.0 if gate == "gelu" else 0.5)
    x_BLD, mask_BL = batch(30)
    assert torch.equal(model.train()(x_BLD, mask_BL), model(x_BLD, mask_BL)) == (gate == "gelu")


def test_steps_equal_the_parallel_form() -> None:
    for conj_sym in (True, False):
        model = mixer(causal=True, bidirectional=False, conj_sym=conj_sym)
        x_BLD, mask_BL = batch(40, 40)
        state_2NB, rows = model.start(2), []
        for t in range(40):
            y_B1D, state_2NB = model.step(x_BLD[:, t : t + 1], state_2NB)
            rows.append(y_B1D)
            assert state_2NB.shape == (2, 4 if conj_sym else 8, 2)
        torch.testing.assert_close(
            torch.cat(rows, dim=1), model(x_BLD, mask_BL), rtol=1e-10, atol=1e-10
        )
    with pytest.raises(ValueError, match="model.bidirectional=true"):
        mixer().start(2)


def test_one_direction_is_causal() -> None:
    model = mixer(causal=True, bidirectional=False)
    x_BLD, mask_BL = batch(40)
    other_BLD = x_BLD.clone()
    other_BLD[0, 25] += 1
    changed_L = (model(other_BLD, mask_BL) != model(x_BLD, mask_BL))[0].any(dim=1)
    assert not changed_L[:25].any() and changed_L[25:].all()


@pytest.mark.parametrize("block_size", [1, 2, 7, 16])
def test_eigenvalues_diagonalise_the_normal_part_of_hippo(block_size: int) -> None:
    matrix_KK = torch.zeros(block_size, block_size, dtype=torch.float64)
    for n in range(block_size):
        for k in range(block_size):
            legs = {True: -(((2 * n + 1) * (2 * k + 1)) ** 0.5), False: 0.0}[n > k]
            low_rank = ((n + 0.5) * (k + 0.5)) ** 0.5
            matrix_KK[n, k] = (-(n + 1) if n == k else legs) + low_rank
    lambda_K, vectors_KK = hippo_eigenvalues(block_size)
    torch.testing.assert_close(
        matrix_KK.to(torch.complex128) @ vectors_KK, vectors_KK * lambda_K, rtol=0, atol=1e-11
    )
    torch.testing.assert_close(
        vectors_KK.mH @ vectors_KK, torch.eye(block_size, dtype=torch.complex128)
    )
    assert (lambda_K.real == -0.5).all()
    assert torch.equal(lambda_K.imag, lambda_K.imag.sort().values)


def test_kept_eigenvalues_are_the_negative_half_of_each_block() -> None:
    lambda_N, vectors_MN = kept_eigenvalues(12, 3, conj_sym=True)
    assert lambda_N.shape == (6,) and vectors_MN.shape == (12, 6)
    assert (lambda_N.imag < 0).all() and torch.equal(lambda_N[:2], lambda_N[4:])
    assert lambda_N.imag[0] < lambda_N.imag[1]
    assert not vectors_MN[4:, :2].any() and vectors_MN[4:8, 2:4].all()
    assert kept_eigenvalues(12, 3, conj_sym=False)[1].shape == (12, 12)


@torch.no_grad()
def test_initial_values_follow_the_source() -> None:
    torch.manual_seed(0)
    sizes = {"state_size": 256, "num_blocks": 4}

    def make(c_init: Any, **knobs: Any) -> S5SSM:
        shape = replace(SMALL, d_model=96)
        return S5Encoder(shape, c_init=c_init, **sizes | knobs).blocks[0].mixer.system

    system = make("lecun_normal")
    step_N = system.log_step.exp()
    assert 0.001 <= step_N.min() < 0.0015 and 0.07 < step_N.max() <= 0.1
    assert float(system.log_step.mean()) == pytest.approx(-4.6, abs=0.3)
    # Unit eigenvectors keep the variance of what they turn; a complex number has two parts.
    assert float(system.B.std()) == pytest.approx((1 / 512) ** 0.5, rel=0.03)
    assert 0.7 < float(system.D.std()) < 1.3
    expected = {
        "lecun_normal": (1 / (96 * 256)) ** 0.5,
        "trunc_standard_normal": (1 / 256) ** 0.5,
        "complex_normal": 0.5**0.5,
    }
    for c_init, std in expected.items():
        system = make(c_init)
        for C in (system.C, system.backward_C):
            assert float(C.std()) == pytest.approx(std, rel=0.03)
        assert not torch.equal(system.C, system.backward_C)
    # With all eigenvectors kept, B is a real matrix in another basis, of the same norm.
    system = make("lecun_normal", conj_sym=False)
    vectors_MN = kept_eigenvalues(256, 4, conj_sym=False)[1]
    B_MD = vectors_MN @ torch.complex(*system.B.double())
    assert B_MD.imag.abs().max() < 1e-6 < B_MD.real.abs().max() < 3 / 16


@pytest.mark.parametrize(
    ("sizes", "options", "num_classes", "num_sequences", "expected"),
    [
        ((20, 128, 8), (16, 8, "half_glu2"), 10, 1, 188_490 - 128),
        ((135, 256, 6), (192, 12, "half_glu2"), 2, 1, 1_321_154 - 256),
        ((98, 128, 6), (256, 16, "half_glu1"), 2, 2, 772_098 - 128),
        ((257, 512, 6), (384, 3, "half_glu1"), 10, 1, 5_133_706),
        ((257, 192, 6), (256, 8, "half_glu1"), 2, 1, 1_113_602),
        ((257, 128, 6), (256, 16, "half_glu1"), 2, 1, 694_018),
    ],
    ids=["listops", "text", "retrieval", "image", "pathfinder", "pathx"],
)
def test_sizes_are_those_of_the_reference(
    sizes: Any, options: Any, num_classes: int, num_sequences: int, expected: int
) -> None:
    """Counted on the authors' code; its linear encoder of one-hot rows has a bias."""
    vocab_size, d_model, num_layers = sizes
    shape = Shape(
        vocab_size=vocab_size, max_length=1024, d_model=d_model, num_layers=num_layers, num_heads=1,
        norm_kind="batch", positions="none", input="real" if vocab_size == 257 else "ids",
        head_hidden=(d_model,) if num_sequences == 2 else (),
    )  # fmt: skip
    names = ("state_size", "num_blocks", "gate")
    model = S5Encoder(shape, block="own", **dict(zip(names, options, strict=True)))
    classifier = Classifier(model, shape, num_classes, num_sequences)
    assert sum(parameter.numel() for parameter in classifier.parameters()) == expected


def test_groups_name_parameters_with_rates_of_their_own() -> None:
    system = mixer().system
    assert system.GROUPS == {
        "Lambda_re": "state", "Lambda_im": "state", "log_step": "step",
        "B": "input", "C": "output", "backward_C": "output",
    }  # fmt: skip
    assert {name for name, _ in system.named_parameters()} == {*system.GROUPS, "D"}


def test_builds_without_memory() -> None:
    with torch.device("meta"):
        model = S5Encoder(SMALL)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"state_size": 0}, "model.state_size=0: expected at least 1"),
        ({"state_size": 7}, "model.state_size=7 with model.conj_sym=true: expected an even"),
        ({"num_blocks": 0}, "model.num_blocks=0: expected a divisor of model.state_size=64"),
        ({"num_blocks": 3}, "model.num_blocks=3: expected a divisor of model.state_size=64"),
        ({"num_blocks": 64}, "model.num_blocks=64 with model.conj_sym=true: .*64 / 64"),
        ({"discretization": "euler"}, "model.discretization='euler': expected one of zoh, bil"),
        ({"c_init": "zeros"}, "model.c_init='zeros': expected one of lecun_normal"),
        ({"gate": "glu"}, "model.gate='glu': expected one of full_glu, half_glu1"),
        ({"step_rescale": 0.0}, "model.step_rescale=0.0: expected more than 0"),
        ({"step_rescale": 1e300}, "model.step_rescale=1e\\+300: .* to 3.4e38"),
        ({"dt_min": 0.1}, "model.dt_min=0.1, model.dt_max=0.1: expected 0 < dt_min < dt_max"),
        ({"dt_min": 0.0}, "model.dt_min=0.0"),
        ({"dt_max": float("inf")}, "model.dt_max=inf"),
        ({"block": "mine"}, "model.block='mine': expected shared or own"),
        ({"causal": True}, "model.causal=true with model.bidirectional=true"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        S5Encoder(SMALL, **knobs)
    if "num_blocks" in knobs or knobs.get("state_size") == 7:
        free = {"state_size": 64, "num_blocks": 1} | knobs | {"conj_sym": False}
        if free["num_blocks"] and free["state_size"] % free["num_blocks"] == 0:
            S5Encoder(SMALL, **free)
