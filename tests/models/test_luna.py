"""Luna: every option against the naive version, causal and cross forms, memory slots, sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.classifier import Classifier
from models.encoder import make_encoder
from models.kernels import CHUNK_LENGTH
from models.luna import LunaAttention, LunaCausalAttention, LunaEncoder, causal_mean
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.models.test_models import count_saved_bytes, largest_difference
from tests.references.luna import attention, causal_attention, luna_encoder

SMALL = Shape(
    vocab_size=9,
    max_length=24,
    d_model=12,
    d_ff=20,
    num_heads=3,
    dropout=0.0,
    attention_dropout=0.0,
)
ERA = replace(SMALL, norm="post", embedding_norm=True)  # the layout of the published LRA numbers
LATER = replace(ERA, positions="sinusoidal", embedding_scale=True)  # and of the code since 2022


def shaken(model: Any, size: float = 0.3) -> Any:
    """In float64 and away from the initial values, so that every part of the model matters."""
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn_like(parameter)
    return model


def build(shape: Shape = SMALL, **knobs: Any) -> LunaEncoder:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # for the tables of positions
    try:
        return shaken(LunaEncoder(shape, **{"projection_length": 6} | knobs))
    finally:
        torch.set_default_dtype(torch.float32)


def rows(*lengths: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(1, 9, (len(lengths), max(lengths)), generator=generator)
    return tokens_BL, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


OPTIONS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "default": (SMALL, {}),
    "era": (ERA, {}),
    "later": (LATER, {}),
    "class_token": (replace(ERA, pooling="cls"), {}),
    "tied": (ERA, {"tie_kv": True}),
    "packed_heads": (SMALL, {"num_packed_heads": 2}),
    "wide_heads": (replace(SMALL, head_dim=5), {"num_packed_heads": 4}),
    "no_bias": (replace(SMALL, attention_bias=False), {}),
    "one_slot": (SMALL, {"projection_length": 1}),
    "many_slots": (LATER, {"projection_length": 40}),
    "fixed": (ERA, {"dynamic_projection": False}),
    "fixed_many_slots": (SMALL, {"projection_length": 40, "dynamic_projection": False}),
    "not_contextual": (SMALL, {"contextual_memory": False}),
    "not_contextual_era": (ERA, {"contextual_memory": False}),
    "pool_memory": (SMALL, {"pool_memory": True}),
    "pool_memory_later": (LATER, {"pool_memory": True}),
    "three_layers": (replace(ERA, num_layers=3), {}),
    "tied_layers": (replace(ERA, num_layers=3, tie_layers=True), {}),
    "causal": (SMALL, {"causal": True}),
    "causal_tied_later": (LATER, {"causal": True, "tie_kv": True}),
    "causal_elu": (ERA, {"causal": True, "activation": "elu"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str) -> None:
    shape, knobs = OPTIONS[name]
    encoder = build(shape, **knobs)
    tokens_BL, mask_BL = rows(20, 9, 1, 4)
    real_BL = encoder.output_mask(mask_BL)
    results = []
    for x_BLD in (encoder(tokens_BL, mask_BL), luna_encoder(encoder, tokens_BL, mask_BL)):
        x_ND = x_BLD[real_BL]
        weight_ND = torch.randn(x_ND.shape, generator=torch.Generator().manual_seed(2)).double()
        parameters = list(encoder.parameters())
        gradients = torch.autograd.grad((x_ND * weight_ND).sum(), parameters, allow_unused=True)
        results.append([x_ND, *gradients])
    for ours, naive in zip(*results, strict=True):
        assert (ours is None) == (naive is None)
        assert ours is None or largest_difference(ours, naive) < 1e-9
    # Only a classifier of the memory leaves something unused: the last layer's way back to tokens.
    assert knobs.get("pool_memory") or all(x is not None for x in results[0])


@pytest.mark.parametrize(
    ("knobs", "base"),
    [
        ({"projection_length": 3}, {}),
        ({"num_packed_heads": 2}, {}),
        ({"contextual_memory": False}, {}),
        ({"pool_memory": True}, {}),
        ({"causal": True}, {}),
        ({"activation": "elu", "causal": True}, {"causal": True}),
        ({"dynamic_projection": False}, {}),
    ],
    ids=str,
)
def test_every_option_changes_the_output(knobs: dict[str, Any], base: dict[str, Any]) -> None:
    tokens_BL, mask_BL = rows(20, 4)
    plain = build(**base)
    changed = build(**knobs)
    state = plain.state_dict()
    shared = {
        key: state[key][: len(value)] if key == "memory" else state[key]
        for key, value in changed.state_dict().items()
        if key in state
    }
    changed.load_state_dict(shared, strict=False)
    mean_BD = changed(tokens_BL, mask_BL)[1, :4].mean(dim=0)
    assert largest_difference(mean_BD, plain(tokens_BL, mask_BL)[1, :4].mean(dim=0)) > 1e-6


def test_tied_keys_and_values_are_one_map() -> None:
    tied, untied = build(tie_kv=True), build()
    for ours, theirs in zip(tied.blocks, untied.blocks, strict=True):
        assert ours.mixer.pack_kv.weight.shape == (12, 12)
        assert theirs.mixer.pack_kv.weight.shape == (24, 12)
    state = tied.state_dict()
    state |= {key: torch.cat([x, x]) for key, x in state.items() if "kv." in key}
    untied.load_state_dict(state)
    assert largest_difference(untied(*rows(20, 9)), tied(*rows(20, 9))) < 1e-12


@pytest.mark.parametrize(
    ("shape", "knobs", "message"),
    [
        ({}, {"projection_length": 0}, "projection_length=0: expected at least 1"),
        ({}, {"num_packed_heads": 5}, "num_packed_heads=5 does not divide shape.d_model=12"),
        ({}, {"num_packed_heads": 0}, "num_packed_heads=0"),
        ({}, {"activation": "relu", "causal": True}, "activation=relu: expected softplus or elu"),
        ({}, {"activation": "elu"}, "activation=elu acts only with model.causal=true"),
        ({}, {"causal": True, "num_packed_heads": 2}, "num_packed_heads=2 with model.causal=true"),
        ({}, {"causal": True, "pool_memory": True}, "pool_memory=true needs"),
        ({}, {"contextual_memory": False, "pool_memory": True}, "pool_memory=true needs"),
        ({"pooling": "cls"}, {"pool_memory": True}, "pool_memory=true with shape.pooling=cls"),
        ({"pooling": "first"}, {"causal": True}, "causal=true with shape.pooling=first"),
    ],
)
def test_refuses(shape: dict[str, Any], knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LunaEncoder(replace(SMALL, **shape), **knobs)


# Memory slots.


def test_an_example_uses_as_many_slots_as_it_has_tokens_at_most() -> None:
    mask_BL = rows(20, 5, 1)[1]
    slots_BM = build(projection_length=6).slots_in_use(mask_BL)
    assert slots_BM.sum(dim=1).tolist() == [6, 5, 1]
    assert build(projection_length=6, dynamic_projection=False).slots_in_use(mask_BL).all()
    # With more slots than the batch has positions, the surplus is not even computed.
    assert build(projection_length=40).slots_in_use(mask_BL).shape == (3, 20)


@pytest.mark.parametrize("shape", [ERA, LATER, replace(SMALL, pooling="cls")])
def test_slots_of_a_short_row_do_not_depend_on_its_neighbours(shape: Shape) -> None:
    shape = replace(shape, max_length=2000)
    model = shaken(Classifier(LunaEncoder(shape, projection_length=16), shape, 3)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tokens_BSL = torch.randint(1, 9, (2, 1, 2000))
    together_BC = model(tokens_BSL, torch.tensor([[2000], [5]]))
    alone_BC = model(tokens_BSL[1:, :, :5], torch.tensor([[5]]))
    assert largest_difference(alone_BC, together_BC[1:]) < 1e-9
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_shortened_memory_is_the_first_slots_of_the_parameter() -> None:
    long, short = build(projection_length=16), build(projection_length=5)
    short.load_state_dict(long.state_dict() | {"memory": long.memory[:5]})
    rows_of_5 = rows(5, 5)
    assert largest_difference(long(*rows_of_5), short(*rows_of_5)) < 1e-12


@pytest.mark.parametrize("init", ["torch", "bert", "lra"])
def test_memory_starts_at_its_own_scale(init: Any) -> None:
    torch.manual_seed(0)
    shape = Shape(vocab_size=9, max_length=9, d_model=256, init=init)
    memory = LunaEncoder(shape, projection_length=256).memory.detach()
    assert float(memory.std()) == pytest.approx(1 / 16, rel=0.02)


def test_pooled_memory_counts_only_slots_in_use() -> None:
    model = shaken(Classifier(LunaEncoder(SMALL, pool_memory=True), SMALL, 3)).eval()
    tokens_BL, mask_BL = rows(20, 4)
    _, memory_BMD = model.encoder.encode(tokens_BL, mask_BL)
    pooled_BD = model.represent(tokens_BL, mask_BL)
    torch.testing.assert_close(pooled_BD[1], memory_BMD[1, :4].mean(dim=0))
    alone_BD = model.represent(tokens_BL[1:, :4], mask_BL[1:, :4])
    assert largest_difference(alone_BD, pooled_BD[1:]) < 1e-12


def test_weights_of_packing_and_of_reading_are_dropped_in_training_only() -> None:
    shape = replace(SMALL, attention_dropout=0.5)
    mixer = shaken(LunaAttention(shape, num_packed_heads=3, tie_kv=False))
    memory_BMD, x_BLD, mask_BL = normal(2, 6, 12), normal(2, 20, 12), rows(20, 4)[1]
    slots_BM = torch.ones(2, 6, dtype=torch.bool)
    for training in (True, False):
        mixer.train(training)
        packed_BMD = mixer.pack(memory_BMD, x_BLD, mask_BL)
        again_BMD = mixer.pack(memory_BMD, x_BLD, mask_BL)
        assert torch.equal(packed_BMD, again_BMD) != training
        y_BLD = mixer.unpack(x_BLD, packed_BMD, slots_BM)
        assert torch.equal(y_BLD, mixer.unpack(x_BLD, packed_BMD, slots_BM)) != training


# Another sequence as context.


@pytest.mark.parametrize("tie_kv", [True, False])
def test_cross_attention_equals_the_naive_version(tie_kv: bool) -> None:
    torch.manual_seed(0)
    mixer = shaken(LunaAttention(SMALL, num_packed_heads=2, tie_kv=tie_kv))
    x_BLD, memory_BMD, context_BND = normal(2, 7, 12), normal(2, 5, 12), normal(2, 20, 12)
    mask_BN, slots_BM = rows(20, 9)[1], rows(5, 3)[1]
    y_BLD, packed_BMD = mixer(x_BLD, memory_BMD, mask_BN, slots_BM, context_BND)
    for b, (num_tokens, num_slots) in enumerate(((20, 5), (9, 3))):
        naive_LD, naive_MD = attention(
            mixer, x_BLD[b], memory_BMD[b, :num_slots], context_BND[b, :num_tokens]
        )
        assert largest_difference(y_BLD[b], naive_LD) < 1e-12
        assert largest_difference(packed_BMD[b, :num_slots], naive_MD) < 1e-12
    # Step by step with the context packed once.
    packed_BMD = mixer.pack(memory_BMD, context_BND, mask_BN)
    steps = [mixer.unpack(x_B1D, packed_BMD, slots_BM) for x_B1D in x_BLD.split(1, dim=1)]
    assert largest_difference(torch.cat(steps, dim=1), y_BLD) < 1e-12
    (gradient,) = torch.autograd.grad(y_BLD.sum(), context_BND)
    assert gradient[1, :9].any() and not gradient[1, 9:].any()


# Causal.


def causal_mixer(shape: Shape = SMALL, **knobs: Any) -> LunaCausalAttention:
    torch.manual_seed(0)
    return shaken(LunaCausalAttention(shape, **{"tie_kv": False, "activation": "softplus"} | knobs))


@pytest.mark.parametrize("tie_kv", [True, False])
@pytest.mark.parametrize("activation", ["softplus", "elu"])
@pytest.mark.parametrize(
    "length", [1, CHUNK_LENGTH - 1, CHUNK_LENGTH, CHUNK_LENGTH + 1, 2 * CHUNK_LENGTH + 5]
)
def test_parallel_and_step_by_step_forms_agree(length: int, activation: str, tie_kv: bool) -> None:
    mixer = causal_mixer(activation=activation, tie_kv=tie_kv)
    x_BLD, memory_BMD, slots_BM = normal(2, length, 12), normal(2, 5, 12), rows(5, 3)[1]
    y_BLD, nothing = mixer(x_BLD, memory_BMD, torch.ones(2, length), slots_BM)
    assert nothing is None
    state = mixer.start(memory_BMD)
    steps = []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = mixer.step(x_B1D, state, slots_BM)
        steps.append(y_B1D)
    stepped_BLD = torch.cat(steps, dim=1)
    assert largest_difference(stepped_BLD, y_BLD) < 1e-11
    assert state.key_sum_BHKM.shape == (2, 3, 4, 5) and state.num_steps == length
    inputs = [x_BLD, memory_BMD, *mixer.parameters()]
    weight_BLD = torch.randn_like(y_BLD)
    ours = torch.autograd.grad((y_BLD * weight_BLD).sum(), inputs)
    theirs = torch.autograd.grad((stepped_BLD * weight_BLD).sum(), inputs)
    assert all(largest_difference(a, b) < 1e-10 for a, b in zip(ours, theirs, strict=True))
    naive_LD = causal_attention(mixer, x_BLD[1], memory_BMD[1, :3])
    assert largest_difference(y_BLD[1], naive_LD) < 1e-11


def test_causal_mean_is_its_definition() -> None:
    x, y, z = normal(2, 1, 70, 3), normal(2, 1, 70, 3), normal(2, 1, 70, 4)
    outer = torch.einsum("bhli,bhlj->bhlij", y, z).cumsum(dim=2)
    expected = torch.einsum("bhli,bhlij->bhlj", x, outer) / torch.arange(1, 71)[:, None]
    assert largest_difference(causal_mean(x, y, z), expected) < 1e-12


def test_causal_memory_is_linear_and_below_one_outer_product_a_position() -> None:
    shape = replace(SMALL, d_model=64, num_heads=1)
    mixer = LunaCausalAttention(shape, tie_kv=False, activation="softplus")
    saved = []
    for length in (1024, 2048):
        x_BLD, memory_BMD = torch.randn(1, length, 64), torch.randn(1, 64, 64)
        with count_saved_bytes() as total:
            mixer(x_BLD, memory_BMD, torch.ones(1, length), torch.ones(1, 64, dtype=torch.bool))
        saved.append(total[0])
    assert saved[1] < 2.1 * saved[0]
    assert saved[1] < 2048 * 64 * 64 * 4


def test_causal_sums_stay_finite_in_half_precision() -> None:
    mixer = causal_mixer().half().eval()
    x_BLD = 5 * torch.randn(1, 4096, 12, dtype=torch.float16)
    memory_BMD = torch.randn(1, 5, 12, dtype=torch.float16)
    y_BLD, _ = mixer(x_BLD, memory_BMD, torch.ones(1, 4096), torch.ones(1, 5, dtype=torch.bool))
    assert y_BLD.dtype == torch.float16 and y_BLD.isfinite().all()


def test_causal_weights_are_dropped_in_training_only() -> None:
    mixer = causal_mixer(replace(SMALL, attention_dropout=0.5))
    inputs = normal(1, 9, 12), normal(1, 5, 12), torch.ones(1, 9), rows(5)[1]
    for training in (True, False):
        mixer.train(training)
        assert torch.equal(mixer(*inputs)[0], mixer(*inputs)[0]) != training


# Sizes of the authors' models, counted on their code, without the token embedding. They count the
# norm of the last packed output, which nothing reads unless the memory is classified, and two more
# rows of positions, since numbers start behind that of padding. Their class token is a token.

SIZES: dict[str, tuple[dict[str, Any], int, int, tuple[int, int, int, int]]] = {
    "listops": (
        {"max_length": 2001, "d_model": 512, "d_ff": 2048, "num_layers": 1, "num_heads": 8,
         "head_hidden": (2048,)},
        10, 1, (5_250_048, 6_048_256, 6_105_600, 6_171_136),
    ),
    "text": (
        {"max_length": 4002, "d_model": 256, "d_ff": 1024, "num_layers": 4, "num_heads": 4,
         "head_hidden": (1024,)},
        2, 1, (4_449_792, 5_245_952, 5_274_624, 5_307_392),
    ),
    "retrieval": (
        {"max_length": 4002, "d_model": 128, "d_ff": 512, "num_layers": 4, "num_heads": 4,
         "head_hidden": (512,), "pair_features": "concat"},
        2, 2, (1_438_464, 1_639_936, 1_654_272, 1_670_656),
    ),
    "image": (
        {"max_length": 1024, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 8,
         "head_hidden": (128,)},
        10, 1, (108_864, 122_624, 129_792, 137_984),
    ),
    "pathfinder": (
        {"max_length": 1026, "d_model": 128, "d_ff": 128, "num_layers": 1, "num_heads": 4,
         "head_hidden": (256,)},
        2, 1, (264_960, 317_056, 331_392, 347_776),
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", SIZES)
def test_parameter_counts_are_the_authors(task: str) -> None:
    sizes, num_classes, num_sequences, expected = SIZES[task]
    sizes = sizes | {"max_length": sizes["max_length"] + 2}
    shape = Shape(vocab_size=1, norm="post", embedding_norm=True, head_bias=False, **sizes)
    counts = []
    for target, knobs in [
        (SoftmaxAttention, {}),
        *((LunaEncoder, {"projection_length": m, "pool_memory": True}) for m in (16, 128, 256)),
    ]:
        model = Classifier(make_encoder(target, shape, **knobs), shape, num_classes, num_sequences)
        embedding = model.encoder.embedding.tokens.weight.numel()
        counts.append(sum(x.numel() for x in model.parameters()) - embedding)
    assert tuple(counts) == expected
