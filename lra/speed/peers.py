"""Other implementations of attention, to measure ours against; not models of the arena.

Each is a mixer inside the same encoder (embedding, norms, feed-forward, pooling, head and sizes),
so only the attention differs. Two are public packages, which the `bench` extra brings, used as they
are published. Benchmarks have no padding, so only the textbook's attention heeds the mask.
Shapes: B batch, L length, D d_model, H heads, K head dim, M landmarks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from models.layers import StackedLinear
from models.shape import Shape

PEERS = {  # what `--peer` adds
    "textbook": "lra.speed.peers.TextbookAttention",
    "nystrom_attention": "lra.speed.peers.NystromAttentionPackage",
    "transformers_nystromformer": "lra.speed.peers.TransformersNystromformer",
}
REFERENCES = {  # what `--check` also needs
    "textbook_nystromformer": "lra.speed.peers.TextbookNystrom",
    "no_mixer": "lra.speed.peers.NoMixer",
}


class TextbookAttention(nn.Module):
    """Softmax attention as textbooks write it: the [L, L] weights are formed, dropped and kept.

    Padding is hidden in the [L, L] scores, whether there is any or not.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = nn.Dropout(shape.attention_dropout)
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        q_BHLK, k_BHLK, v_BHLK = rearrange(
            self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads
        )
        score_BHLL = q_BHLK @ k_BHLK.mT / math.sqrt(q_BHLK.shape[-1])
        score_BHLL = score_BHLL.masked_fill(~mask_BL[:, None, None], -torch.inf)
        weight_BHLL = self.dropout(score_BHLL.softmax(dim=-1))
        return self.out(rearrange(weight_BHLL @ v_BHLK, "b h l k -> b l (h k)"))


class TextbookNystrom(nn.Module):
    """Nystrom attention as the paper writes it, left to right, with PyTorch's own convolution.

    Source: Xiong et al. 2021, https://arxiv.org/abs/2102.03902, section 3. Zeros behind the tokens
    make the length a multiple of M.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_landmarks: int = 128,
        pinv_iterations: int = 6,
        conv_kernel_size: int = 35,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_landmarks = shape.num_heads, num_landmarks
        self.pinv_iterations = pinv_iterations
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.conv = nn.Conv2d(
            shape.num_heads,
            shape.num_heads,
            (conv_kernel_size, 1),
            padding=(conv_kernel_size // 2, 0),
            groups=shape.num_heads,
            bias=False,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        length = x_BLD.shape[1]
        x_BLD = F.pad(x_BLD, (0, 0, 0, -length % self.num_landmarks))
        q_BHLK, k_BHLK, v_BHLK = rearrange(
            self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads
        )
        q_BHLK = q_BHLK / math.sqrt(q_BHLK.shape[-1])
        ql_BHMK, kl_BHMK = (
            reduce(part, "b h (m s) k -> b h m k", "mean", m=self.num_landmarks)
            for part in (q_BHLK, k_BHLK)
        )
        left_BHLM = (q_BHLK @ kl_BHMK.mT).softmax(dim=-1)
        a_BHMM = (ql_BHMK @ kl_BHMK.mT).softmax(dim=-1)
        right_BHML = (ql_BHMK @ k_BHLK.mT).softmax(dim=-1)
        identity_MM = torch.eye(self.num_landmarks, device=x_BLD.device)
        z_BHMM = a_BHMM.mT / a_BHMM.sum(dim=-2).max()
        for _ in range(self.pinv_iterations):
            y_BHMM = a_BHMM @ z_BHMM
            inner_BHMM = 15 * identity_MM - y_BHMM @ (7 * identity_MM - y_BHMM)
            z_BHMM = 0.25 * z_BHMM @ (13 * identity_MM - y_BHMM @ inner_BHMM)
        y_BHLK = left_BHLM @ z_BHMM @ (right_BHML @ v_BHLK) + self.conv(v_BHLK)
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)")[:, :length])


class NoMixer(nn.Module):
    """No attention at all: what the rest of the encoder costs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """The input."""
        return x_BLD


class NystromAttentionPackage(nn.Module):
    """`NystromAttention` of https://pypi.org/project/nystrom-attention/.

    It has no dropout inside and no bias of query, key and value, and puts zeros in front of the
    tokens to make the length a multiple of M.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_landmarks: int = 128,
        pinv_iterations: int = 6,
        conv_kernel_size: int = 35,
    ) -> None:
        super().__init__()
        try:
            from nystrom_attention import NystromAttention
        except ImportError:
            raise ValueError(_missing("nystrom-attention")) from None
        self.attention = NystromAttention(
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
    """`NystromformerSelfAttention` of https://pypi.org/project/transformers/ and an output map.

    It works at one length, a multiple of M; zeros behind the tokens reach it. The inverse always
    takes six steps.

    Raises:
        ValueError: the package is not installed, or `shape.head_dim` is not d_model / num_heads.
    """

    def __init__(
        self, shape: Shape, *, num_landmarks: int = 128, conv_kernel_size: int = 35
    ) -> None:
        super().__init__()
        try:
            from transformers.models.nystromformer import NystromformerConfig
            from transformers.models.nystromformer.modeling_nystromformer import (
                NystromformerSelfAttention,
            )
        except ImportError:
            raise ValueError(_missing("transformers")) from None
        if shape.num_heads * shape.attention_head_dim != shape.d_model:
            raise ValueError(
                f"shape.head_dim={shape.head_dim}: transformers has d_model / num_heads only"
            )
        longest = shape.max_length + (shape.pooling == "cls")
        self.length = -(-longest // num_landmarks) * num_landmarks
        config: Any = NystromformerConfig(
            hidden_size=shape.d_model,
            num_attention_heads=shape.num_heads,
            num_landmarks=num_landmarks,
            segment_means_seq_len=self.length,
            conv_kernel_size=conv_kernel_size,
            attention_probs_dropout_prob=shape.attention_dropout,
        )
        self.attention = NystromformerSelfAttention(config)
        self.out = nn.Linear(shape.d_model, shape.d_model)

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        length = x_BLD.shape[1]
        padded_BLD = F.pad(x_BLD, (0, 0, 0, self.length - length))
        return self.out(self.attention(padded_BLD)[0][:, :length])


def _missing(package: str) -> str:
    return f"{package} is not installed; pip install -e '.[bench]' brings it"
