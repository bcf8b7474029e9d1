"""LSH attention: naive version, options, rings of chunks, padding, low precision, both paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ring_attention
from models.encoder import make_encoder
from models.reformer import ReformerAttention, default_buckets
from models.rings import Window, hash_tokens, make_rings
from models.shape import Shape
from tests.references.reformer import reformer_attention

SMALL = Shape(vocab_size=9, max_length=64, d_model=12, num_heads=2)


def mixer(shape: Shape = SMALL, *, seed: int = 0, **knobs: Any) -> ReformerAttention:
    """Large projections, so that attention is far from uniform and every option shows."""
    torch.manual_seed(seed)
    model = ReformerAttention(shape, **{"chunk_length": 4} | knobs).double()
    with torch.no_grad():
        model.query_value.weight.mul_(4)
    return model


def batch(*lengths: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    length = max(lengths) if length is None else length
    x_BLD = torch.randn(len(lengths), length, 12, dtype=torch.float64)
    return x_BLD, torch.arange(length) < torch.tensor(lengths)[:, None]


def all_gradients(model: nn.Module, y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((y * weight).sum(), [x, *model.parameters()]))


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one_hash": {"num_hashes": 1},
    "four_hashes": {"num_hashes": 4},
    "two_buckets": {"num_buckets": 2},
    "factors": {"num_buckets": [2, 6, 4]},
    "chunks_of_one": {"chunk_length": 1},
    "chunks_of_seven": {"chunk_length": 7},
    "own_chunk_only": {"num_chunks_before": 0},
    "behind": {"num_chunks_after": 1},
    "behind_only": {"num_chunks_before": 0, "num_chunks_after": 2},
    "wide": {"num_chunks_before": 3, "num_chunks_after": 2},
    "wide_one_hash": {"num_hashes": 1, "num_chunks_before": 2, "num_chunks_after": 2},
    "mask_later": {"mask_later": True},
    "mask_later_wide": {"mask_later": True, "num_chunks_before": 2, "num_chunks_after": 1},
    "padded": {"padded_chunks": True},
    "padded_wide": {"padded_chunks": True, "num_chunks_before": 2, "num_chunks_after": 2},
    "padded_later": {"padded_chunks": True, "mask_later": True},
}


@pytest.fixture(params=["example by example", "all at once"])
def path(request: pytest.FixtureRequest) -> Any:
    """A CPU's path and the other, which devices and compiled code take."""
    if request.param == "example by example":
        yield
    else:
        with mock.patch.object(ring_attention, "has_fast_path", lambda x: False):
            yield


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_naive_version_with_gradients(name: str, path: None) -> None:
    model = mixer(**OPTIONS[name])
    x_BLD, mask_BL = batch(21, 13, 9, 8, 5, 4, 3, 1)
    mask_BL[1, [0, 6, 7, 8, 9]] = False  # holes
    x_BLD.requires_grad_()
    weight_BLD = torch.randn_like(x_BLD) * mask_BL[..., None]
    ours_BLD = model(x_BLD, mask_BL)
    naive_BLD = reformer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(ours_BLD[mask_BL], naive_BLD[mask_BL], rtol=1e-9, atol=1e-10)
    for ours, naive in zip(
        all_gradients(model, ours_BLD, x_BLD, weight_BLD),
        all_gradients(model, naive_BLD, x_BLD, weight_BLD),
        strict=True,
    ):
        torch.testing.assert_close(ours, naive, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [{"head_dim": 7}, {"attention_bias": False}, {"num_heads": 3}])
def test_equals_the_naive_version_in_other_shapes(shape: dict[str, Any]) -> None:
    model = mixer(replace(SMALL, **shape))
    x_BLD, mask_BL = batch(17, 9, 2)
    naive_BLD = reformer_attention(model, x_BLD, mask_BL)
    torch.testing.assert_close(model(x_BLD, mask_BL)[mask_BL], naive_BLD[mask_BL])


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_output(name: str) -> None:
    base = {key: value for key, value in OPTIONS[name].items() if key == "mask_later"}
    if name in ("mask_later", "padded"):
        base = {}
    one, other = mixer(**base), mixer(**OPTIONS[name])
    other.load_state_dict(one.state_dict() | {"rotations_HKM": other.rotations_HKM})
    x_BLD, mask_BL = batch(21, 13)
    assert (one(x_BLD, mask_BL) - other(x_BLD, mask_BL))[mask_BL].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"num_hashes": 0}, "num_hashes=0: expected at least 1"),
        ({"num_buckets": 3}, "num_buckets=3: expected an even number"),
        ({"num_buckets": 0}, "num_buckets=0: expected an even number"),
        ({"num_buckets": [4, 5]}, r"num_buckets=\[4, 5\]: expected an even number"),
        ({"num_buckets": []}, r"num_buckets=\[\]: expected an even number"),
        ({"chunk_length": 0}, "chunk_length=0: expected at least 1"),
        ({"num_chunks_before": -1}, "num_chunks_before=-1: expected at least 0"),
        ({"num_chunks_after": -1}, "num_chunks_after=-1: expected at least 0"),
        ({"variant": "lra"}, "variant='lra': expected one of hashed, arena"),
        ({"variant": "arena", "mask_later": True}, "variant='arena': .* neither model.mask_later"),
        ({"variant": "arena", "padded_chunks": True}, "variant='arena': .* model.padded_chunks"),
        (
            {"variant": "arena", "num_buckets": 10, "chunk_length": 32},
            "chunk_length=32: acts only with model.variant=hashed or model.num_buckets=null",
        ),
        ({"causal": True}, "causal=true: .* later tokens .*mask_later=true"),
    ],
)
def test_refuses(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReformerAttention(SMALL, **knobs)


@pytest.mark.parametrize("pooling", ["cls", "first"])
def test_mask_later_refuses_to_be_read_at_the_first_position(pooling: Any) -> None:
    with pytest.raises(ValueError, match=f"mask_later=true with shape.pooling={pooling}"):
        ReformerAttention(replace(SMALL, pooling=pooling), mask_later=True)


def test_number_of_buckets_follows_the_length() -> None:
    """1,024, 2,048 and 4,096 tokens in chunks of 64: 32, 64 and 128; factors only above that."""
    expected = {1: [2], 63: [2], 127: [2], 128: [4], 191: [4], 192: [4], 256: [8], 1024: [32],
                2048: [64], 2049: [64], 4000: [64], 4096: [128], 8192: [16, 16],
                16_384: [16, 32]}  # fmt: skip
    assert {length: default_buckets(length, 64) for length in expected} == expected
    assert mixer(replace(SMALL, max_length=63, pooling="cls")).bucket_factors == [4, 8]


def test_buckets_are_the_largest_of_projections_and_their_negatives() -> None:
    model = mixer(num_buckets=[4, 2], num_hashes=1)
    with torch.no_grad():
        model.rotations_HKM.zero_()
        model.rotations_HKM[:, 0, 0] = 1  # the first factor's two columns, then the second's
        model.rotations_HKM[:, 1, 1] = 1
        model.rotations_HKM[:, 2, 2] = 1
    q_LK = torch.zeros(6, 6, dtype=torch.float64)
    q_LK[:, :3] = torch.tensor(
        [[3, 1, 1], [1, 3, 1], [-3, 1, 1], [1, -3, 1], [-3, 1, -1], [0, 0, 0]]
    )
    bucket_BHRL = hash_tokens(
        q_LK.expand(1, 2, 6, 6), model.rotations_HKM, num_hashes=1, factors=[4, 2]
    )
    assert bucket_BHRL.shape == (1, 2, 1, 6)
    assert bucket_BHRL[0, 0, 0].tolist() == [0, 1, 2, 3, 6, 0]


def test_tokens_of_a_bucket_stay_in_order_and_padding_comes_last() -> None:
    bucket_BHRL = torch.tensor([1, 0, 1, 0, 3, 0, 1]).expand(2, 1, 1, 7)
    mask_BL = torch.tensor([[True] * 7, [True, True, False, True, True, False, False]])
    rings = make_rings(bucket_BHRL, mask_BL, Window(2, before=1, after=0))
    token_BE = rings.token_F.masked_fill(~rings.is_real_F, -1).view(2, 10)
    # The chunk before the first is the last one. Tokens of the second row are 7 to 13.
    assert token_BE[0].tolist() == [4, -1, 1, 3, 5, 0, 2, 6, 4, -1]
    assert token_BE[1].tolist() == [7, 11, 8, 10, 7, 11, 8, 10, 7, 11]
    # Windows of the first ring, one across both, those of the second.
    assert rings.is_plain_X.int().tolist() == [0, 1, 1, 0, 0, 0, 1, 0, 1]
    query_BL = rings.query_TR.view(2, 7)
    assert query_BL[0].tolist() == [3, 0, 4, 1, 6, 2, 5]
    assert (query_BL[1][mask_BL[1]] - 10).tolist() == [2, 0, 1, 3]
    # A chunk is what the next one reads first.
    key_CBL = rings.key_TP.T.reshape(2, 2, 7)
    assert key_CBL[1, 0].tolist() == [7, 2, 10, 3, 14, 6, 11]
    assert key_CBL[0, 0].tolist() == [9, 4, 12, 5, 0, 8, 13]
    assert (key_CBL[:, 1][:, mask_BL[1]] - 20).tolist() == [[0, 4, 5, 1], [6, 2, 3, 7]]


def test_alike_tokens_read_each_other_wherever_they_stand() -> None:
    """Six kinds of tokens, four each and one for each bucket: every token reads its own kind."""
    model = mixer(num_buckets=12, num_hashes=1, num_chunks_before=0)
    with torch.no_grad():
        model.query_value.weight.copy_(torch.eye(12).repeat(2, 1))
        model.rotations_HKM.copy_(torch.eye(6))
    kind_L = torch.arange(24) % 6
    x_BLD = torch.eye(6, dtype=torch.float64)[kind_L].repeat(1, 2)[None]
    x_BLD = (x_BLD + 0.01 * torch.randn_like(x_BLD)).requires_grad_()
    y_BLD = model(x_BLD, torch.ones(1, 24, dtype=torch.bool))
    gradient_LD = torch.autograd.grad(y_BLD[0, 5].sum(), x_BLD)[0][0]
    assert not gradient_LD[kind_L != 5].any()
    assert all(gradient_LD[i].any() for i in (5, 11, 17, 23))


def test_a_token_reads_itself_only_where_there_is_nothing_else() -> None:
    model = mixer()
    x_BLD, mask_BL = batch(2, 1, length=3)
    y_BLD = model(x_BLD, mask_BL)
    v_BLE = x_BLD @ model.query_value.weight[12:].T
    torch.testing.assert_close(y_BLD[0, :2], model.out(v_BLE[0, :2].flip(0)))
    torch.testing.assert_close(y_BLD[1, 0], model.out(v_BLE[1, 0]))


def test_a_row_of_one_chunk_gets_plain_attention_without_itself() -> None:
    model = mixer(chunk_length=8)
    x_BLD, mask_BL = batch(8, 30, 5)
    q_BHLK, v_BHLK = (
        part.unflatten(2, (2, 6)).transpose(1, 2) for part in model.query_value(x_BLD).chunk(2, 2)
    )
    k_BHLK = q_BHLK / (q_BHLK.square().mean(3, keepdim=True) + 1e-6).sqrt() / 6**0.5
    readable_BLL = mask_BL[:, None, :] & ~torch.eye(30, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(
        q_BHLK, k_BHLK, v_BHLK, attn_mask=readable_BLL[:, None], scale=1.0
    )
    expected_BLD = model.out(expected.transpose(1, 2).flatten(2))
    y_BLD = model(x_BLD, mask_BL)
    for row in (0, 2):
        torch.testing.assert_close(y_BLD[row][mask_BL[row]], expected_BLD[row][mask_BL[row]])
    assert (y_BLD - expected_BLD)[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in OPTIONS if not name.startswith("padded")])
def test_neither_padding_nor_neighbours_change_a_row(name: str, path: None) -> None:
    model = mixer(**OPTIONS[name])
    lengths = [30, 16, 9, 4, 1]
    x_BLD, mask_BL = batch(*lengths)
    together_BLD = model(x_BLD, mask_BL)
    filled_BLD = x_BLD.masked_fill(~mask_BL[..., None], 1e3)
    torch.testing.assert_close(model(filled_BLD, mask_BL)[mask_BL], together_BLD[mask_BL])
    for row, length in enumerate(lengths):
        for padding in (0, 7):
            alone_1LD = F.pad(x_BLD[row : row + 1, :length], (0, 0, 0, padding), value=5.0)
            mask_1L = (torch.arange(length + padding) < length)[None]
            alone_LD = model(alone_1LD, mask_1L)[0, :length]
            torch.testing.assert_close(alone_LD, together_BLD[row, :length])


def test_padded_chunks_let_padding_in() -> None:
    model = mixer(padded_chunks=True)
    x_BLD, mask_BL = batch(20, length=28)
    short, long = (model(x_BLD[:, :n], mask_BL[:, :n]) for n in (20, 28))
    assert (short - long[:, :20]).abs().max() > 1e-3
    x_BLD, mask_BL = batch(20, 20)
    torch.testing.assert_close(mixer()(x_BLD, mask_BL), model(x_BLD, mask_BL))


def test_padding_mixes_to_zero_and_gets_no_gradient(path: None) -> None:
    model = mixer()
    x_BLD, mask_BL = batch(9, 0, length=13)
    x_BLD.requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    torch.testing.assert_close(y_BLD[~mask_BL], model.out.bias.expand_as(y_BLD)[~mask_BL])
    (gradient_BLD,) = torch.autograd.grad(y_BLD.square().sum(), x_BLD)
    assert not gradient_BLD[~mask_BL].any() and gradient_BLD[mask_BL].all()


def test_mask_later_reads_no_later_token_but_lets_it_move_a_chunk(path: None) -> None:
    model = mixer(mask_later=True)
    x_BLD, mask_BL = batch(24)
    x_BLD.requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    gradient_LD = torch.autograd.grad(y_BLD[0, 15].sum(), x_BLD)[0][0]
    assert gradient_LD[:16].any() and not gradient_LD[16:].any()
    other_BLD = x_BLD.detach().clone()
    other_BLD[0, 16:] = torch.randn(8, 12)
    assert (model(other_BLD, mask_BL) - y_BLD)[0, :16].abs().max() > 1e-3


def test_rotations_come_from_the_seed_and_are_kept_with_the_weights() -> None:
    one, same, other = mixer(), mixer(), mixer(seed=1)
    assert torch.equal(one.rotations_HKM, same.rotations_HKM)
    assert not torch.equal(one.rotations_HKM, other.rotations_HKM)
    x_BLD, mask_BL = batch(21)
    assert torch.equal(one(x_BLD, mask_BL), one(x_BLD, mask_BL))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x_BLD, mask_BL), other(x_BLD, mask_BL))
    encoder = make_encoder(ReformerAttention, replace(SMALL, num_layers=2), chunk_length=4)
    first, second = (block.mixer.rotations_HKM for block in encoder.blocks)
    assert not torch.equal(first, second)


def test_both_paths_agree() -> None:
    x_BLD, mask_BL = batch(21, 13, 4, 0)
    x_BLD.requires_grad_()
    results = []
    for fast in (True, False):
        model = mixer()
        with mock.patch.object(ring_attention, "has_fast_path", lambda x, fast=fast: fast):
            y_BLD = model(x_BLD, mask_BL)
            results.append([y_BLD, *all_gradients(model, y_BLD, x_BLD, torch.ones(()))])
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other)


def test_a_single_padded_row_of_one_head_goes_both_paths() -> None:
    """Worked on all at once it still has chunks behind its own ring."""
    model = mixer(replace(SMALL, num_heads=1))
    x_BLD, mask_BL = batch(13, length=40)
    expected_BLD = reformer_attention(model, x_BLD, mask_BL)
    for fast in (True, False):
        with mock.patch.object(ring_attention, "has_fast_path", lambda x, fast=fast: fast):
            torch.testing.assert_close(model(x_BLD, mask_BL)[mask_BL], expected_BLD[mask_BL])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_half_precision_input_runs_in_float32(dtype: torch.dtype) -> None:
    model = mixer().to(dtype)
    qv_BLTHK = torch.randn(2, 30, 2, 2, 6).to(dtype)
    mask_BL = batch(30, 17)[1]
    half_BLHK = model.attend(qv_BLTHK, mask_BL)
    with torch.autocast("cpu", dtype=dtype):
        cast_BLHK = model.attend(qv_BLTHK, mask_BL)
    expected_BLHK = model.float().attend(qv_BLTHK.float(), mask_BL).to(dtype)
    torch.testing.assert_close(half_BLHK, expected_BLHK)
    torch.testing.assert_close(cast_BLHK, expected_BLHK)


def test_tokens_that_see_only_themselves_are_exact_in_float32(path: None) -> None:
    """Their logits are -1e5, where float32 has steps of 0.008."""
    model = mixer(mask_later=True)
    x_BLD, mask_BL = batch(21, 1, length=21)
    x_BLD.requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    weight_BLD = torch.zeros_like(x_BLD)
    weight_BLD[:, 0] = 1
    expected = [y_BLD[:, 0], *all_gradients(model, y_BLD, x_BLD, weight_BLD)]
    model, x_BLD = model.float(), x_BLD.detach().float().requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    found = [y_BLD[:, 0], *all_gradients(model, y_BLD, x_BLD, weight_BLD.float())]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [0.0, 1e-4, 1e4])
def test_extreme_queries_stay_finite(factor: float, path: None) -> None:
    model = mixer().float()
    with torch.no_grad():
        model.query_value.weight[:12] *= factor
    x_BLD, mask_BL = batch(21, 9)
    x_BLD = x_BLD.float().requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    gradients = all_gradients(model, y_BLD, x_BLD, torch.ones(()))
    assert all(t.isfinite().all() for t in [y_BLD, *gradients])


def test_memory_for_the_backward_pass_is_linear_in_length() -> None:
    model = mixer(chunk_length=16).float()

    def saved(length: int) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(1, length, 12), torch.ones(1, length, dtype=torch.bool))
        return total

    assert saved(4096) < 2.1 * saved(2048)


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 48])
def test_the_arenas_variant_takes_any_length_and_lets_padding_in(length: int, path: None) -> None:
    model = mixer(num_buckets=6, num_hashes=1, variant="arena", chunk_length=64)
    x_BLD, mask_BL = batch(length, length=length + 1)
    x_BLD.requires_grad_()
    y_BLD = model(x_BLD, mask_BL)
    assert y_BLD.shape == x_BLD.shape
    gradients = all_gradients(model, y_BLD, x_BLD, mask_BL[..., None])
    assert all(t.isfinite().all() for t in [y_BLD, *gradients])
    assert gradients[0][:, -1].any()  # that of the padding


def test_the_arenas_variant_has_one_set_of_rotations_and_needs_full_width() -> None:
    one, other = mixer(variant="arena"), mixer(variant="arena", seed=1)
    assert torch.equal(one.rotations_HKM, other.rotations_HKM)
    assert torch.equal(one.rotations_HKM[0], one.rotations_HKM[1])
    with pytest.raises(ValueError, match=r"num_heads \* head_dim = shape.d_model, here 2 \* 7"):
        mixer(replace(SMALL, head_dim=7), variant="arena")


def test_compiled_code_gives_the_same() -> None:
    """Of two layers the compiler's front end, of whatever backend, fails inside the second."""
    model, (x_BLD, mask_BL) = mixer(), batch(5, 9)
    x_BLD.requires_grad_()

    def run(x_BLD: Tensor) -> Tensor:
        return model(model(x_BLD, mask_BL), mask_BL)

    compiled = torch.compile(run, backend="eager", dynamic=True)
    weight, (y, expected) = torch.randn_like(x_BLD), (f(x_BLD) for f in (compiled, run))
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(
        *(all_gradients(model, out, x_BLD, weight) for out in (y, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
