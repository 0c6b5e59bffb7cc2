"""The packed batch: what a step reads, and what each field means.

Everything that depends on lengths, grids or token ids is computed on the host when a batch is
made (`mmfn.data.pack`), so a step never has to look at a value on the device.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmfn import tree
from mmfn.tree import pytree


@pytree
class Segments:
    """Which neighbours of a row belong together; attention never crosses a border."""

    number: Int[Tensor, " tokens"]
    """Segment of each token from 1, in order; 0 is the padded tail, which is a segment too."""
    ends: Int[Tensor, " segments"]
    """End of each segment in order, int32, always on the CPU; the last entry is the number of
    tokens, and is repeated up to a fixed length, so that one compiled graph serves all batches."""


@pytree
class Media:
    """The patches of all pictures and video frames of a batch, then a padded tail.

    Patches are in merge-block order: the `merge²` patches that become one token follow each other.
    One segment is one frame. There is always at least one block: a batch without pictures has a
    buffer of padding only, so that every rank does the same work.
    """

    patches: Float[Tensor, "patches patch_dim"]
    """Normalised pixels of each patch, channel · time · height · width flattened in this order."""
    segments: Segments
    positions: Int[Tensor, "2 patches"]
    """Row and column of each patch in its frame, for rotary positions."""
    places: Int[Tensor, "4 patches"]
    """The four entries of the learned table of positions to be blended for each patch."""
    blend: Float[Tensor, "4 patches"]
    """Their weights, float32, which sum to one (zero in the tail)."""


@pytree
class Batch:
    """One row of tokens of many samples, their pictures, and what is asked of the model.

    `at` lists the places where the next token is supervised; only there the head is computed.
    The loss is `sum(weights * cross_entropy) / count`; `count` is global (all ranks and
    micro-batches of an optimizer step), so the result does not depend on how a step is split.
    """

    tokens: Int[Tensor, " tokens"]
    segments: Segments
    positions: Int[Tensor, "3 tokens"]
    """Time, row and column of each token, from 0 in each sample (MRoPE)."""
    media: Media
    real: Bool[Tensor, " tokens"]
    """Which tokens are no padding."""
    feature: Int[Tensor, " tokens"]
    """Which merged patch stands at each token; -1 for text."""
    at: Int[Tensor, " supervised"]
    """Places whose next token is a target, in order, padded with 0."""
    targets: Int[Tensor, " supervised"]
    """The next token at each of them, padded with 0."""
    weights: Float[Tensor, " supervised"]
    """Weight of each target, float32; 0 for padding."""
    count: Float[Tensor, ""]
    """What the weighted sum is divided by; float32."""


def to_device(batch: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Move a batch, but for the ends of its segments, which fused attention reads on the host."""

    def move(path: str, leaf: Tensor) -> Tensor:
        stays = path.endswith("segments.ends")
        return leaf if stays else leaf.to(device, non_blocking=non_blocking)

    return tree.map_with_path(move, batch)
