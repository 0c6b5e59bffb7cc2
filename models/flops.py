"""The floating-point operations of Qwen3-VL, from the lengths of what is in a batch.

Counted are matrix products and attention, two operations a multiply-add; norms, rotary positions,
activations and the soft-max are left out. Padding and recompute are no work.
"""

import attrs
import torch

from mmfn.batch import Batch, Segments
from mmfn.models import qwen3_vl, vision


@attrs.frozen
class Lengths:
    """How much is in a batch, without padding."""

    samples: tuple[int, ...]
    """Tokens of each sample."""
    frames: tuple[int, ...]
    """Patches of each picture or frame."""
    supervised: int
    """Targets."""


@attrs.frozen
class Flops:
    """Operations of a step."""

    forward: int
    backward: int
    """Each product is done twice: for the gradient of its weight and of its input, except the
    first of the tower, whose input is pixels."""

    @property
    def total(self) -> int:
        """Both together."""
        return self.forward + self.backward


def lengths(batch: Batch) -> Lengths:
    """Read the lengths of a batch that is still on the CPU.

    Raises:
        ValueError: it is on another device, which would have to be waited for; names it.
    """
    device = batch.segments.number.device
    if device.type != "cpu":
        raise ValueError(f"lengths are read of a batch on the CPU, and this one is on {device}")
    return Lengths(
        samples=_sizes(batch.segments),
        frames=_sizes(batch.media.segments),
        supervised=int((batch.weights != 0).sum()),
    )


def count(cfg: qwen3_vl.Config, lengths: Lengths) -> Flops:
    """Count the operations of one forward and backward of everything."""
    tokens = sum(lengths.samples)
    pairs = sum(n * (n + 1) // 2 for n in lengths.samples)
    width, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    products = tokens * cfg.embed * (2 * width + 2 * keys)
    dense = tokens * cfg.embed * 3 * cfg.mlp
    decoder = cfg.layers * (products + 2 * width * pairs) + (cfg.layers - len(cfg.mixed)) * dense
    if cfg.experts is not None:
        own = cfg.experts
        mixed = tokens * cfg.embed * (own.experts + 3 * own.choices * own.mlp)
        decoder += len(cfg.mixed) * mixed
    head = lengths.supervised * cfg.embed * cfg.vocab
    patch, tower = _tower(cfg.vision, lengths.frames)
    inner = decoder + head + tower
    return Flops(forward=2 * (inner + patch), backward=2 * (2 * inner + patch))


def _tower(cfg: vision.Config, frames: tuple[int, ...]) -> tuple[int, int]:
    """Count the multiply-adds of the first product of the tower, and of all that follows."""
    patches = sum(frames)
    pairs = sum(n * n for n in frames)
    merged = cfg.embed * cfg.merge**2
    block = patches * cfg.embed * (4 * cfg.embed + 2 * cfg.mlp) + 2 * cfg.embed * pairs
    merger = patches // cfg.merge**2 * merged * (merged + cfg.out)
    rest = cfg.layers * block + (1 + len(cfg.deepstack)) * merger
    return patches * cfg.patch_dim * cfg.embed, rest


def _sizes(segments: Segments) -> tuple[int, ...]:
    """Give the lengths of segments, without the padded tail."""
    ends = torch.unique_consecutive(segments.ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    padded = bool(segments.number[-1] == 0)
    return tuple(sizes[:-1] if padded else sizes)
