"""Fused operations for CUDA: torch's flash attention over packed segments, RMSNorm and AdamW."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfn import ops as op
from mmfn.batch import Segments
from mmfn.kernels.cpu import adamw_ as adamw_
from mmfn.kernels.loss import cross_entropy
from mmfn.kernels.routing import permute, unpermute


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool) -> Tensor:
    """Attend by the variable-length flash kernel; in a dtype that it lacks, by the definition."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return op.attention(q, k, v, segments, causal=causal)
    from torch.nn.attention.varlen import varlen_attn

    ends = F.pad(segments.ends, (1, 0)).to(q.device, non_blocking=True)
    # The longest segment is not known without reading the host's lengths in the graph; an upper
    # bound is what the kernel needs.
    longest = len(q)
    window = (-1, 0) if causal else (-1, -1)
    out = varlen_attn(
        q.flatten(1, 2), k, v, ends, ends, longest, longest, window_size=window, enable_gqa=True
    )
    assert isinstance(out, Tensor)
    return out.view_as(q)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Normalise with torch's fused kernel, which sums in float32."""
    return F.rms_norm(x, (x.shape[-1],), scale, eps)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each expert with its matrix in one call; in bfloat16."""
    if x.dtype != torch.bfloat16:
        return op.grouped_linear(x, weight, counts)
    # Rows that belong to no expert are left unwritten by the kernel.
    none = torch.arange(len(x), device=x.device) >= counts.sum()
    y = F.grouped_mm(x, weight, offs=counts.cumsum(0).int())
    return y.masked_fill(none[:, None], 0.0)


OPS = op.Ops(
    attention=attention,
    rms_norm=rms_norm,
    permute=permute,
    unpermute=unpermute,
    grouped_linear=grouped_linear,
    cross_entropy=cross_entropy,
)
"""The table of operations for CUDA."""
