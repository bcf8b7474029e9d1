"""Mega: every option against the naive version, both forms of its parts, steps, sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import mega
from models.classifier import Classifier
from models.convolution import long_convolution, sum_of_powers
from models.mega import MegaAttention, MegaBlock, MegaEncoder, attend_in_chunks, moving_sums
from models.shape import Shape
from tests.models.test_luna import shaken
from tests.models.test_models import count_saved_bytes, largest_difference
from tests.references.mega import mega_attention, own_layers

SMALL = Shape(
    vocab_size=9,
    max_length=24,
    d_model=12,
    d_ff=20,
    num_heads=1,
    dropout=0.0,
    attention_dropout=0.0,
)
FUNCTIONS: list[Any] = ["softmax", "laplace", "relu2"]
CAUSAL = {"causal": True, "bidirectional": False}


def mixer(shape: Shape = SMALL, **knobs: Any) -> MegaAttention:
    torch.manual_seed(0)
    return shaken(MegaAttention(shape, **{"chunk_size": 5} | knobs))


def encoder(shape: Shape = SMALL, **knobs: Any) -> MegaEncoder:
    torch.manual_seed(0)
    return shaken(MegaEncoder(shape, **{"chunk_size": 5} | knobs))


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def masks(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@contextmanager
def other_path() -> Iterator[None]:
    """What is computed inside goes the way of other devices."""
    with mock.patch.object(mega, "has_fast_path", lambda _x: False):
        yield


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"chunk_size": None},
    "laplace": {"attention_function": "laplace"},
    "laplace_whole_rotary": {
        "attention_function": "laplace", "chunk_size": None, "position_bias": "rotary"
    },
    "relu2": {"attention_function": "relu2"},
    "rotary": {"position_bias": "rotary"},
    "chunk_1": {"attention_function": "laplace", "chunk_size": 1},
    "chunk_above_length": {"chunk_size": 50},
    "one_average": {"ema_size": 1},
    "sizes": {"ema_size": 3, "z_size": 4, "v_size": 7},
    "truncated": {"truncation": 6},
    "truncated_to_1": {"truncation": 1},
    "truncation_above_length": {"truncation": 30},
    "one_direction": {"bidirectional": False},
    "one_direction_truncated": {"bidirectional": False, "truncation": 4},
    "causal": CAUSAL,
    "causal_whole": CAUSAL | {"chunk_size": None},
    "causal_laplace": CAUSAL | {"attention_function": "laplace", "position_bias": "rotary"},
    "causal_relu2_truncated": CAUSAL | {"attention_function": "relu2", "truncation": 3},
}  # fmt: skip


@pytest.mark.parametrize("fast", [True, False], ids=["cpu", "other"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str, fast: bool) -> None:
    model = mixer(**OPTIONS[name])
    x_BLD, mask_BL = normal(4, 20, 12), masks(20, 9, 1, 4)
    with mock.patch.object(mega, "AVERAGE_BLOCK", 8):
        if fast:
            y_BLD = model(x_BLD, mask_BL)
        else:
            with other_path():
                y_BLD = model(x_BLD, mask_BL)
    weight_ND = torch.randn(y_BLD[mask_BL].shape, dtype=torch.float64)
    results = []
    for z_BLD in (y_BLD, mega_attention(model, x_BLD, mask_BL)):
        z_ND = z_BLD[mask_BL]
        loss = (z_ND * weight_ND).sum()
        results.append([z_ND, *torch.autograd.grad(loss, [x_BLD, *model.parameters()])])
    for ours, naive in zip(*results, strict=True):
        assert largest_difference(ours, naive) < 1e-9
    for key, gradient in zip(dict(model.named_parameters()), results[0][2:], strict=True):
        # The only tap of a kernel has no decay.
        assert gradient.any() != (key == "ema.alpha" and name == "truncated_to_1"), key


@pytest.mark.parametrize("kind", ["layer", "scale", "rms", "batch"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_own_layers_equal_the_naive_version_with_gradients(norm: Any, kind: Any) -> None:
    shape = replace(SMALL, norm=norm, norm_kind=kind, positions="none")
    model = encoder(shape, block="own", attention_function="laplace").eval()
    assert isinstance(model.blocks[0], MegaBlock)
    tokens_BL, mask_BL = torch.randint(1, 9, (3, 20)), masks(20, 9, 1)
    results = []
    for run in (model, lambda *args: own_layers(model, *args)):
        x_ND = run(tokens_BL, mask_BL)[mask_BL]
        weight_ND = torch.randn(x_ND.shape, generator=torch.Generator().manual_seed(2)).double()
        gradients = torch.autograd.grad((x_ND * weight_ND).sum(), list(model.parameters()))
        results.append([x_ND, *gradients])
    for ours, naive in zip(*results, strict=True):
        assert largest_difference(ours, naive) < 1e-9
    assert all(gradient.any() for gradient in results[0])


def test_the_shared_block_with_its_norm_behind_is_megas_gate() -> None:
    """With the norm in front the gate works on the normed input, and the layers differ."""
    for norm, same in (("post", True), ("pre", False)):
        shape = replace(SMALL, norm=norm)
        shared, own = encoder(shape), encoder(shape, block="own")
        own.load_state_dict(shared.state_dict())
        x_BLD, mask_BL = normal(2, 20, 12), masks(20, 9)
        block, own_block = shared.blocks[0], own.blocks[0]
        normed_BLD = block.norm1(x_BLD, mask_BL) if norm == "pre" else x_BLD
        y_BLD = x_BLD + block.mixer(normed_BLD, mask_BL)
        y_BLD = y_BLD if norm == "pre" else block.norm1(y_BLD, mask_BL)
        assert (largest_difference(own_block.attend(x_BLD, mask_BL), y_BLD) < 1e-12) == same
    assert torch.equal(own_block.ffn.activation(x_BLD), F.silu(x_BLD))


@pytest.mark.parametrize(
    "knobs",
    [
        {"chunk_size": 7},
        {"chunk_size": None},
        {"truncation": 3},
        {"bidirectional": False},
        {"attention_function": "laplace"},
        {"attention_function": "relu2"},
        {"position_bias": "rotary"},
        {"block": "own"},
    ],
    ids=str,
)
def test_every_option_changes_the_output(knobs: dict[str, Any]) -> None:
    tokens_BL, mask_BL = torch.randint(1, 9, (2, 20)), masks(20, 9)
    plain, changed = encoder(), encoder(**knobs)
    state = plain.state_dict()
    shared = {
        key: state[key] if state[key].shape == value.shape else state[key][: len(value)]
        for key, value in changed.state_dict().items()
        if key in state and len(value) <= len(state[key])
    }
    changed.load_state_dict(shared, strict=False)
    before_ND, after_ND = (model(tokens_BL, mask_BL)[mask_BL] for model in (plain, changed))
    assert largest_difference(after_ND, before_ND) > 1e-4


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"chunk_size": 0}, "model.chunk_size=0: expected at least 1"),
        ({"ema_size": 0}, "model.ema_size=0: expected at least 1"),
        ({"z_size": 0}, "model.z_size=0: expected at least 1"),
        ({"v_size": -1}, "model.v_size=-1: expected at least 1"),
        ({"truncation": 0}, "model.truncation=0: expected at least 1"),
        ({"z_size": 3, "position_bias": "rotary"}, "model.z_size=3 with .*rotary: .*even"),
        ({"attention_function": "tanh"}, "attention_function=tanh: .* softmax, laplace, relu2"),
        ({"position_bias": "none"}, "model.position_bias=none: .* simple, rotary"),
        ({"block": "mine"}, "model.block=mine: expected shared or own"),
        ({"causal": True}, "model.causal=true with model.bidirectional=true"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegaEncoder(SMALL, **knobs)


@pytest.mark.parametrize("pooling", ["cls", "first"])
def test_refuses_to_classify_from_a_position_that_sees_too_little(pooling: Any) -> None:
    shape = replace(SMALL, pooling=pooling)
    with pytest.raises(ValueError, match=f"causal=true with shape.pooling={pooling}"):
        MegaEncoder(shape, **CAUSAL)
    with pytest.raises(ValueError, match=f"bidirectional=false with shape.pooling={pooling}"):
        MegaEncoder(shape, bidirectional=False)
    MegaEncoder(shape, bidirectional=False, chunk_size=None)


# The moving average.


@pytest.mark.parametrize("num_directions", [1, 2])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 61])
def test_moving_sums_are_the_long_convolution(length: int, num_directions: int) -> None:
    torch.manual_seed(0)
    inputs = normal(3, length, 5), normal(5 * num_directions, 4), normal(5 * num_directions, 4)
    x_BLD, weight_EN, raw_EN = inputs
    results = []
    with mock.patch.object(mega, "AVERAGE_BLOCK", 8):
        decay_EN = raw_EN.sigmoid()
        kernels = sum_of_powers(weight_EN, decay_EN, length + 1).chunk(num_directions)
        for y_BLD in (
            moving_sums(x_BLD, weight_EN, decay_EN),
            long_convolution(x_BLD, *kernels),
        ):
            loss = (y_BLD * torch.linspace(-1, 2, 5 * length).view(length, 5)).sum()
            results.append([y_BLD, *torch.autograd.grad(loss, inputs, retain_graph=True)])
    for ours, expected in zip(*results, strict=True):
        assert largest_difference(ours, expected) < 1e-11


def test_slow_averages_stay_exact_over_long_sequences_in_float32() -> None:
    weight_EN, decay_EN = torch.ones(1, 1), torch.full((1, 1), 1 - 2.0**-12)
    y_BLD = moving_sums(torch.ones(1, 16_384, 1), weight_EN, decay_EN)
    expected = (1 - decay_EN.double() ** 16_384) / (1 - decay_EN.double())
    assert float(y_BLD[0, -1]) == pytest.approx(float(expected), rel=1e-5)


def test_padding_has_no_part_in_averages_whatever_stands_there() -> None:
    ema = mixer().ema
    x_BLD, mask_BL = normal(2, 20, 12), masks(20, 9)
    y_BLD = ema(x_BLD, mask_BL)
    spoilt_BLD = torch.where(mask_BL[..., None], x_BLD, 1e3)
    assert torch.equal(ema(spoilt_BLD, mask_BL)[mask_BL], y_BLD[mask_BL])
    alone_BLD = ema(x_BLD[1:, :9], mask_BL[1:, :9])
    assert largest_difference(alone_BLD[0], y_BLD[1, :9]) < 1e-12


# Attention.


def attention_inputs(num_chunks: int = 6, length: int = 12) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k = normal(num_chunks, length, 4), normal(num_chunks, length, 4)
    return q, k, normal(num_chunks, length, 5), normal(length, length)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("block_size", [1, 40, 144, 300, 2**19])
def test_attention_is_its_formula_however_it_is_cut(block_size: int, function: Any) -> None:
    q, k, v, bias = attention_inputs()
    hidden_GC = torch.zeros(6, 12, dtype=torch.bool)
    hidden_GC[1, 7:] = hidden_GC[4, 3:] = True
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    seen = bias.masked_fill(later, -torch.inf)
    with mock.patch.object(mega, "BLOCK_SIZE", block_size):
        y = attend_in_chunks(q, k, v, seen, hidden_GC, function=function)
    score = q @ k.mT + bias
    allowed = ~later & ~hidden_GC[:, None]
    if function == "softmax":
        weight = score.exp() * allowed
        weight = weight / weight.sum(dim=2, keepdim=True)
    elif function == "laplace":
        z = (score - 0.707107) / 0.282095
        weight = torch.distributions.Normal(0.0, 1.0).cdf(z) * allowed
    else:
        weight = score.clamp(min=0) ** 2 * allowed
    expected = weight @ v
    results = []
    for z in (y, expected):
        loss = (z * torch.linspace(-1, 2, 60).view(12, 5)).sum()
        results.append([z, *torch.autograd.grad(loss, [q, k, v, bias], retain_graph=True)])
    for ours, theirs in zip(*results, strict=True):
        assert largest_difference(ours, theirs) < 1e-9


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("block_size", [40, 2**19])
def test_gradients_are_those_of_the_weights_that_were_kept(block_size: int, function: Any) -> None:
    inputs = attention_inputs(2, 5)
    hidden_GC = masks(5, 3).logical_not()

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)  # so that every call drops the same
        return attend_in_chunks(*tensors, hidden_GC, function=function, dropout=0.4)

    with mock.patch.object(mega, "BLOCK_SIZE", block_size):
        assert torch.autograd.gradcheck(run, inputs)
        assert not torch.equal(
            run(*inputs), attend_in_chunks(*inputs, hidden_GC, function=function)
        )


@pytest.mark.parametrize("fast", [True, False], ids=["cpu", "other"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dropped_weights_keep_their_mean(function: Any, fast: bool) -> None:
    q, k, v, bias = (x.detach() for x in attention_inputs(1))
    hidden_GC = torch.zeros(1, 12, dtype=torch.bool)
    expected = attend_in_chunks(q, k, v, bias, hidden_GC, function=function)
    many = (x.expand(4000, -1, -1) for x in (q, k, v))
    with mock.patch.object(mega, "has_fast_path", lambda _x: fast):
        y = attend_in_chunks(
            *many, bias, hidden_GC.expand(4000, -1), function=function, dropout=0.3
        )
    error = y.std(dim=0) / math.sqrt(4000)
    assert ((y.mean(dim=0) - expected[0]).abs() <= 5 * error).all() and (error > 0).sum() > 50


def test_weights_are_not_kept_for_the_gradient() -> None:
    """Memory stays linear where a chunk is the whole sequence."""
    shape = replace(SMALL, max_length=1024, attention_dropout=0.1)
    for function in FUNCTIONS:
        model = MegaAttention(shape, chunk_size=None, attention_function=function)
        with count_saved_bytes() as saved:
            model(torch.randn(1, 1024, 12), torch.ones(1, 1024, dtype=torch.bool))
        # The matrix of position biases is there once, the weights are not.
        assert saved[0] < 1.5 * 4 * 1024**2


def test_a_chunk_as_long_as_the_sequence_is_the_whole_sequence() -> None:
    whole, chunked = mixer(chunk_size=None), mixer(chunk_size=24)
    assert whole.position_bias.table.shape == chunked.position_bias.table.shape == (47,)
    chunked.load_state_dict(whole.state_dict())
    for length in (24, 20, 1):
        x_BLD, mask_BL = normal(2, length, 12), masks(length, max(1, length - 3))
        assert largest_difference(chunked(x_BLD, mask_BL), whole(x_BLD, mask_BL)) < 1e-12


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_attention_passes_the_end_of_a_chunk(function: Any) -> None:
    model = mixer(attention_function=function, chunk_size=5)
    with torch.no_grad():  # what is left of the layer passes nothing on
        model.ema.gamma.zero_()
        model.position_bias.table.fill_(1.0)
    x_BLD, mask_BL = normal(1, 20, 12), masks(20)
    (gradient,) = torch.autograd.grad(model(x_BLD, mask_BL)[0, 7].square().sum(), x_BLD)
    assert gradient[0].any(dim=1).nonzero()[:, 0].tolist() == [5, 6, 7, 8, 9]


def test_the_table_of_positions_has_a_row_for_the_class_token() -> None:
    model = encoder(replace(SMALL, pooling="cls"), chunk_size=None)
    assert model.blocks[0].mixer.position_bias.max_positions == 25
    assert model(torch.ones(1, 24, dtype=torch.int64), masks(24)).shape == (1, 25, 12)
    rotary = mixer(chunk_size=None, position_bias="rotary")
    assert rotary(normal(1, 40, 12), masks(40)).isfinite().all()
    with pytest.raises(ValueError, match="25 positions .* built for 24"):
        mixer(chunk_size=None)(normal(1, 25, 12), masks(25))


# Causal.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("truncation", [None, 3])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_causal_means_causal(chunk_size: Any, truncation: Any, function: Any) -> None:
    knobs = CAUSAL | {"truncation": truncation, "attention_function": function}
    model = mixer(chunk_size=chunk_size, **knobs)
    x_BLD, mask_BL = normal(1, 20, 12), masks(20)
    (gradient,) = torch.autograd.grad(model(x_BLD, mask_BL)[0, 12].square().sum(), x_BLD)
    gradient_L = gradient[0].abs().amax(dim=1)
    assert gradient_L[12] > 1e-3 and (gradient_L[13:] < 1e-12).all()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("truncation", [None, 1, 3, 40])
@pytest.mark.parametrize("chunk_size", [None, 1, 5, 30])
def test_parallel_and_step_by_step_forms_agree(
    chunk_size: Any, truncation: Any, function: Any
) -> None:
    knobs = CAUSAL | {"truncation": truncation, "attention_function": function}
    model = mixer(chunk_size=chunk_size, **knobs)
    x_BLD = normal(2, 17, 12)
    y_BLD = model(x_BLD, masks(17, 17))
    state, steps = model.start(2), []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = model.step(x_B1D, state)
        steps.append(y_B1D)
    stepped_BLD = torch.cat(steps, dim=1)
    assert largest_difference(stepped_BLD, y_BLD) < 1e-10
    inputs, weight_BLD = [x_BLD, *model.parameters()], torch.randn_like(y_BLD)
    ours = torch.autograd.grad((y_BLD * weight_BLD).sum(), inputs)
    theirs = torch.autograd.grad((stepped_BLD * weight_BLD).sum(), inputs)
    assert all(largest_difference(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("truncation", [None, 3, 9999])
def test_a_state_with_chunks_does_not_grow(truncation: Any) -> None:
    model = mixer(truncation=truncation, **CAUSAL)
    state, sizes = model.start(1), []
    with torch.no_grad():
        for x_B1D in normal(1, 40, 12).split(1, dim=1):
            _, state = model.step(x_B1D, state)
            sizes.append(state.k_BCZ.numel() + state.v_BCV.numel())
    assert max(sizes) == sizes[4] == sizes[39] == 5 * (6 + 12)
    assert state.average.memory_BDN.shape == (1, 12, min(truncation or 4, SMALL.max_length))


def test_steps_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="causal=false"):
        mixer().start(1)
    model = mixer(chunk_size=None, **CAUSAL)
    state = model.start(1)
    with pytest.raises(ValueError, match="25 positions"):
        for x_B1D in normal(1, 25, 12).split(1, dim=1):
            _, state = model.step(x_B1D, state)


# Dropout, low precision, initial values, sizes.


def test_each_rate_drops_in_training_only_and_at_its_place() -> None:
    x_BLD, mask_BL = normal(2, 20, 12), masks(20, 9)
    for change, parts in (
        ({"dropout": 0.5}, {"ema_dropout", "value_dropout"}),
        ({"dropout": 0.5, "activation_dropout": 0.0}, {"ema_dropout"}),
        ({"activation_dropout": 0.5}, {"value_dropout"}),
        ({"attention_dropout": 0.5}, {"attention_dropout"}),
    ):
        model = mixer(replace(SMALL, **change))
        assert {name for name, part in model.named_modules() if getattr(part, "p", 0)} == parts
        for training in (True, False):
            model.train(training)
            same = torch.equal(model(x_BLD, mask_BL), model(x_BLD, mask_BL))
            assert same != training
    # Mega's own layer drops the candidate; it is all that is left when the other rates are 0.
    block = encoder(replace(SMALL, dropout=0.5), block="own").blocks[0].train()
    block.mixer.ema_dropout.p = block.mixer.value_dropout.p = 0.0
    u_BLD, h_BLD = block.mixer.gate_and_candidate(block.norm1(x_BLD, mask_BL), mask_BL)
    y_BLD = block.attend(x_BLD, mask_BL)
    kept_BLD, dropped_BLD = (x_BLD + u_BLD * (factor * h_BLD - x_BLD) for factor in (2.0, 0.0))
    is_kept, is_dropped = (y_BLD - kept_BLD).abs() < 1e-9, (y_BLD - dropped_BLD).abs() < 1e-9
    assert (is_kept | is_dropped).all() and is_kept.any() and is_dropped.any()


@pytest.mark.parametrize("block", ["shared", "own"])
@pytest.mark.parametrize("position_bias", ["simple", "rotary"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_is_near(dtype: Any, function: Any, position_bias: Any, block: Any) -> None:
    knobs = {"attention_function": function, "position_bias": position_bias, "block": block}
    torch.manual_seed(0)
    model = MegaEncoder(SMALL, chunk_size=5, **knobs).eval()
    tokens_BL, mask_BL = torch.randint(1, 9, (2, 20)), masks(20, 9)
    exact_ND = model(tokens_BL, mask_BL)[mask_BL]
    autocast_error, error = [], []
    with torch.autocast("cpu", torch.bfloat16):
        autocast_error.append(largest_difference(model(tokens_BL, mask_BL)[mask_BL], exact_ND))
    for path in (True, False):
        with mock.patch.object(mega, "has_fast_path", lambda _x, path=path: path):
            x_ND = model.to(dtype)(tokens_BL, mask_BL)[mask_BL]
            assert x_ND.dtype == dtype
            error.append(largest_difference(x_ND.float(), exact_ND))
    assert max(autocast_error) < 0.05 and max(error) < 0.05


def test_initial_values_are_the_authors() -> None:
    torch.manual_seed(0)
    shape = Shape(vocab_size=9, max_length=4000, d_model=256, init="mega")
    model = MegaEncoder(shape, ema_size=16, chunk_size=None, block="own").blocks[0].mixer

    def spread(x: Tensor) -> tuple[float, float]:
        return float(x.detach().mean()), float(x.detach().std())

    for value, mean, std in (
        (model.ema.delta, 0, 0.2), (model.ema.alpha, 0, 0.2), (model.ema.beta[:, 0::2], 1, 0.02),
        (model.ema.beta[:, 1::2], -1, 0.02), (model.ema.gamma, 0, 1), (model.ema.omega, 0, 1),
        (model.gamma, 0, 0.02), (model.position_bias.table, 0, 0.02), (model.maps.weight, 0, 0.02),
        (model.value.weight, 0, 0.02), (model.hidden.weight, 0, 0.02),
    ):  # fmt: skip
        assert spread(value) == (pytest.approx(mean, abs=0.15 * std), pytest.approx(std, rel=0.15))
    for value in (model.beta, model.maps.bias, model.value.bias, model.hidden.bias):
        assert not value.any()
    rotary = MegaAttention(shape, position_bias="rotary").position_bias
    assert spread(rotary.alpha)[1] == pytest.approx(0.02, rel=0.15)


# Sizes of the authors' models: layers, d_model, z, v, positions, truncation, classes, sequences,
# chunk, and their counts for the whole sequence and for chunks, without the table of tokens.

TASKS = {
    "listops": (6, 80, 64, 160, 2002, 1024, 10, 1, 128, 600_658, 578_170),
    "text": (4, 128, 64, 256, 4002, 1024, 2, 1, 128, 957_204, 926_212),
    "retrieval": (6, 128, 64, 256, 4002, 1024, 2, 2, 128, 1_451_806, 1_405_318),
    "image": (8, 160, 96, 320, 1024, 1024, 10, 1, 128, 2_838_776, 2_824_440),
    "pathfinder": (6, 128, 64, 256, 1024, 1024, 2, 1, 128, 1_386_618, 1_375_866),
    "pathx": (4, 64, 32, 128, 16384, 4096, 2, 1, 4096, 381_820, 283_516),
}


@pytest.mark.parametrize("name", TASKS)
def test_sizes_are_those_of_the_authors_models(name: str) -> None:
    layers, width, z, v, length, truncation, classes, sequences, chunk, *counts = TASKS[name]
    pixels = name in ("image", "pathfinder", "pathx")
    shape = Shape(
        vocab_size=257,
        max_length=length,
        d_model=width,
        d_ff=v,
        num_layers=layers,
        num_heads=1,
        norm="pre" if pixels else "post",
        norm_kind="batch" if pixels else "layer" if name == "listops" else "scale",
        positions="none",
        head_hidden=(256,) if name == "retrieval" else (v,),
        head_bias=False,
        pair_features="concat",
    )
    knobs: dict[str, Any] = {"ema_size": 16, "z_size": z, "v_size": v, "truncation": truncation}
    for chunk_size, expected in zip((None, chunk), counts, strict=True):
        model = MegaEncoder(shape, block="own", chunk_size=chunk_size, **knobs)
        classifier = Classifier(model, shape, classes, sequences)
        count = sum(parameter.numel() for parameter in classifier.parameters())
        assert count - model.embedding.tokens.weight.numel() == expected
