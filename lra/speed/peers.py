"""Public packages, to measure our attention against theirs; not models of the arena.

Each is a mixer inside the same encoder (embedding, norms, feed-forward, pooling, head and sizes),
so only the attention differs. It is the package's own module as it is published, with the widths
and dropout of the shape and those options of our model that it has too, at our model's values; what
else differs from ours stands with each. The `bench` extra brings the packages. Benchmarks have no
padding, so the mask reaches only what cannot do without one; where a package wants a multiple of
some length, zeros behind the tokens fill it up and are read.
Shapes: B batch, L length, D d_model, K head dim, M landmarks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lra.values import load_target
from models.shape import Shape


class Peer(NamedTuple):
    """Another implementation of what a model of ours computes, or of what comes closest to it."""

    model: str  # ours
    target: str
    package: str | None = None  # on PyPI; None: it is our own
    fault: str | None = None  # which spares it work that ours does


PEERS = {  # what `--peer` adds
    "textbook": Peer("softmax", "lra.speed.textbook.TextbookAttention"),
    "nystrom_attention": Peer(
        "nystromformer", "lra.speed.peers.NystromAttentionPackage", "nystrom-attention"
    ),
    "transformers_nystromformer": Peer(
        "nystromformer", "lra.speed.peers.TransformersNystromformer", "transformers"
    ),
    "linear_attention_transformer": Peer(
        "linear", "lra.speed.peers.LinearAttentionTransformer", "linear-attention-transformer"
    ),
    "performer_pytorch": Peer("performer", "lra.speed.peers.PerformerPytorch", "performer-pytorch"),
    "linformer_package": Peer("linformer", "lra.speed.peers.LinformerPackage", "linformer"),
    "local_attention": Peer("local", "lra.speed.peers.LocalAttentionPackage", "local-attention"),
    "transformers_longformer": Peer(
        "longformer", "lra.speed.peers.TransformersLongformer", "transformers"
    ),
    "transformers_bigbird": Peer("bigbird", "lra.speed.peers.TransformersBigBird", "transformers"),
    "sinkhorn_transformer": Peer(
        "sinkhorn",
        "lra.speed.peers.SinkhornTransformer",
        "sinkhorn-transformer",
        fault="sorts no values",
    ),
    "reformer_pytorch": Peer("reformer", "lra.speed.peers.ReformerPytorch", "reformer-pytorch"),
}
REFERENCES = {  # what `--check` also needs
    "textbook_nystromformer": "lra.speed.textbook.TextbookNystrom",
    "textbook_s4d": "lra.speed.textbook.TextbookS4D",
    "textbook_scan": "lra.speed.textbook.TextbookScan",
    "textbook_mega": "lra.speed.textbook.TextbookMega",
    "no_mixer": "lra.speed.textbook.NoMixer",
}
TARGETS = {name: peer.target for name, peer in PEERS.items()} | REFERENCES


class NystromAttentionPackage(nn.Module):
    """`NystromAttention` of nystrom-attention.

    It has no dropout inside and no bias of query, key and value, and puts zeros in front of the
    tokens to make the length a multiple of M.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_landmarks: int,
        pinv_iterations: int,
        conv_kernel_size: int,
    ) -> None:
        super().__init__()
        self.attention = published("nystrom_attention.NystromAttention")(
            dim=shape.d_model,
            dim_head=shape.attention_head_dim,
            heads=shape.num_heads,
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            residual_conv_kernel=conv_kernel_size,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(x_BLD)


class TransformersNystromformer(nn.Module):
    """`NystromformerSelfAttention` of transformers and an output map.

    It works at one length, a multiple of M; zeros behind the tokens reach it. The inverse always
    takes six steps.

    Raises:
        ValueError: the package is not installed, or `shape.head_dim` is not d_model / num_heads.
    """

    def __init__(self, shape: Shape, *, num_landmarks: int, conv_kernel_size: int) -> None:
        super().__init__()
        self.length = longest(shape, num_landmarks)
        models = "transformers.models.nystromformer"
        config = published(f"{models}.NystromformerConfig")(
            **transformers_sizes(shape),
            num_landmarks=num_landmarks,
            segment_means_seq_len=self.length,
            conv_kernel_size=conv_kernel_size,
        )
        attention = published(f"{models}.modeling_nystromformer.NystromformerSelfAttention")
        self.attention = attention(config)
        self.out = nn.Linear(shape.d_model, shape.d_model)

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        length = x_BLD.shape[1]
        padded_BLD = F.pad(x_BLD, (0, 0, 0, self.length - length))
        return self.out(self.attention(padded_BLD)[0][:, :length])


class LinearAttentionTransformer(nn.Module):
    """`SelfAttention` of linear-attention-transformer.

    Queries go through a softmax over their features and keys through one over the positions, where
    ours takes elu(x) + 1 of both. No bias of query, key and value.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        path = "linear_attention_transformer.linear_attention_transformer.SelfAttention"
        self.attention = published(path)(
            shape.d_model, shape.num_heads, dim_head=shape.attention_head_dim
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(x_BLD)


class PerformerPytorch(nn.Module):
    """`SelfAttention` of performer-pytorch: positive features with orthogonal rows.

    The relu kernel has rows there too, K ln K of them where `num_features` is None.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, shape: Shape, *, kernel: str, num_features: int | None) -> None:
        super().__init__()
        attention = published("performer_pytorch.SelfAttention")
        with torch.device("cpu"):  # its features come from a decomposition, which `meta` lacks
            self.attention = attention(
                shape.d_model,
                heads=shape.num_heads,
                dim_head=shape.attention_head_dim,
                nb_features=num_features,
                generalized_attention=kernel == "relu",
                qkv_bias=shape.attention_bias,
                attn_out_bias=shape.attention_bias,
            )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(x_BLD)


class LinformerPackage(nn.Module):
    """`LinformerSelfAttention` of linformer.

    Keys and values have a table each, in every layer, where ours share one: its option for that
    makes values and keys the same. No bias of query, key and value.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, shape: Shape, *, rank: int) -> None:
        super().__init__()
        self.attention = published("linformer.LinformerSelfAttention")(
            shape.d_model,
            longest(shape),
            k=rank,
            heads=shape.num_heads,
            dim_head=shape.attention_head_dim,
            dropout=shape.attention_dropout,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(x_BLD)


class LocalAttentionPackage(nn.Module):
    """`LocalMHA` of local-attention: as many positions on either side as half of `window`.

    That is one more than ours has. No biases, and positions only from the encoder, as ours.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, shape: Shape, *, window: int) -> None:
        super().__init__()
        self.attention = published("local_attention.LocalMHA")(
            dim=shape.d_model,
            window_size=window // 2,
            dim_head=shape.attention_head_dim,
            heads=shape.num_heads,
            dropout=shape.attention_dropout,
            use_rotary_pos_emb=False,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix near positions; [B, L, D]."""
        return self.attention(x_BLD)


class TransformersLongformer(nn.Module):
    """`LongformerSelfAttention` of transformers, its first positions global, and an output map.

    Half of `window` on either side, which is one position more than ours.

    Raises:
        ValueError: the package is not installed, or `shape.head_dim` is not d_model / num_heads.
    """

    def __init__(self, shape: Shape, *, window: int, num_global: int) -> None:
        super().__init__()
        self.window, self.num_global = window, num_global
        models = "transformers.models.longformer"
        config = published(f"{models}.LongformerConfig")(
            **transformers_sizes(shape), attention_window=[window]
        )
        attention = published(f"{models}.modeling_longformer.LongformerSelfAttention")
        self.attention = attention(config, layer_id=0)
        self.out = nn.Linear(shape.d_model, shape.d_model)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        length = x_BLD.shape[1]
        x_BLD, mask_BL = filled(x_BLD, self.window), F.pad(mask_BL, (0, -length % self.window))
        is_global_BL = torch.zeros_like(mask_BL)
        is_global_BL[:, : self.num_global] = True
        # Its code for a token: -10000 is not there, 0 reads its window, 10000 is global.
        code_BL = 10000.0 * (is_global_BL.to(x_BLD.dtype) - (~mask_BL).to(x_BLD.dtype))
        y_BLD = self.attention(
            x_BLD,
            attention_mask=code_BL,
            is_index_masked=~mask_BL,
            is_index_global_attn=is_global_BL,
            is_global_attn=self.num_global > 0,
        )[0]
        return self.out(y_BLD[:, :length])


class TransformersBigBird(nn.Module):
    """`BigBirdBlockSparseAttention` of transformers and an output map.

    It works at one length, a multiple of the block. In training it draws random blocks anew in
    every step, from the first positions where the length is not one of the paper's; it has no
    dropout inside, and fills an [L, L] table of weights for its caller.

    Raises:
        ValueError: the package is not installed, `shape.head_dim` is not d_model / num_heads, or
            the longest input has too few blocks.
    """

    def __init__(self, shape: Shape, *, block_size: int, num_random: int) -> None:
        super().__init__()
        self.block_size, self.length = block_size, longest(shape, block_size)
        if self.length // block_size <= 5 + 2 * num_random:
            raise ValueError(
                f"task.max_length={shape.max_length}: expected more than "
                f"{5 + 2 * num_random} blocks of {block_size} for BigBird of transformers"
            )
        models = "transformers.models.big_bird"
        config = published(f"{models}.BigBirdConfig")(
            **transformers_sizes(shape),
            block_size=block_size,
            num_random_blocks=num_random,
            max_position_embeddings=self.length,
            use_bias=shape.attention_bias,
        )
        attention = published(f"{models}.modeling_big_bird.BigBirdBlockSparseAttention")
        self.masks = published(f"{models}.BigBirdModel").create_masks_for_block_sparse_attn
        self.attention = attention(config, seed=0)
        self.out = nn.Linear(shape.d_model, shape.d_model, bias=shape.attention_bias)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        length, rest = x_BLD.shape[1], self.length - x_BLD.shape[1]
        real_BL = F.pad(mask_BL, (0, rest)).to(x_BLD.dtype)
        blocked, band, from_mask, to_mask = self.masks(real_BL, self.block_size)
        y_BLD = self.attention(
            F.pad(x_BLD, (0, 0, 0, rest)), band, from_mask, to_mask, blocked, blocked
        )[0]
        return self.out(y_BLD[:, :length])


class SinkhornTransformer(nn.Module):
    """`SinkhornSelfAttention` of sinkhorn-transformer, balanced as ours.

    Gumbel noise is always on, and sorted values are sorted keys, by an oversight there. No bias of
    query, key and value.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block_size: int,
        num_iterations: int,
        temperature: float,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        path = "sinkhorn_transformer.sinkhorn_transformer.SinkhornSelfAttention"
        self.attention = published(path)(
            shape.d_model,
            block_size,
            longest(shape, block_size),
            heads=shape.num_heads,
            dim_head=shape.attention_head_dim,
            non_permutative=False,
            sinkhorn_iter=num_iterations,
            temperature=temperature,
            attn_dropout=shape.attention_dropout,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(filled(x_BLD, self.block_size))[:, : x_BLD.shape[1]]


class ReformerPytorch(nn.Module):
    """`LSHSelfAttention` of reformer-pytorch.

    It has as many buckets in a round as chunks, hashes anew in every call, and weighs rounds
    against each other behind their softmax. As in ours, query and value have no bias and weights
    are not dropped.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, shape: Shape, *, num_hashes: int, chunk_length: int) -> None:
        super().__init__()
        self.chunk_length = chunk_length
        self.attention = published("reformer_pytorch.LSHSelfAttention")(
            shape.d_model,
            heads=shape.num_heads,
            bucket_size=chunk_length,
            n_hashes=num_hashes,
            dim_head=shape.attention_head_dim,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        return self.attention(filled(x_BLD, 2 * self.chunk_length))[:, : x_BLD.shape[1]]


def shared_options(name: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """What a peer takes of the options of our model, `model` of its composed config."""
    target: Any = load_target(TARGETS[name], "model")
    return {k: v for k, v in model.items() if k in inspect.signature(target).parameters}


def published(path: str) -> Any:
    """What a package calls `path`.

    Raises:
        ValueError: the package is not installed.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        package = module.partition(".")[0].replace("_", "-")
        raise ValueError(
            f"{package} is not installed; pip install -e '.[bench]' brings it"
        ) from None


def transformers_sizes(shape: Shape) -> dict[str, Any]:
    """What all configs of transformers call alike.

    Raises:
        ValueError: `shape.head_dim` is not d_model / num_heads.
    """
    if shape.num_heads * shape.attention_head_dim != shape.d_model:
        raise ValueError(
            f"shape.head_dim={shape.head_dim}: transformers has d_model / num_heads only"
        )
    return {
        "hidden_size": shape.d_model,
        "num_attention_heads": shape.num_heads,
        "attention_probs_dropout_prob": shape.attention_dropout,
    }


def longest(shape: Shape, multiple: int = 1) -> int:
    """Positions of the longest input, filled up to a multiple."""
    length = shape.max_length + (shape.pooling == "cls")
    return length + -length % multiple


def filled(x_BLD: Tensor, multiple: int) -> Tensor:
    """With zeros behind the tokens, so that the length is a multiple."""
    return F.pad(x_BLD, (0, 0, 0, -x_BLD.shape[1] % multiple))
