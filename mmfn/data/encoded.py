"""A sample as token ids and patches: what chat encoding gives and packing takes."""

import attrs
import numpy as np
from jaxtyping import Bool, Float, Int


@attrs.frozen
class Run:
    """The tokens of one picture or one video frame: consecutive, one for each merged patch."""

    start: int
    """Index of its first token."""
    height: int
    """Rows of patches, a multiple of the merge size."""
    width: int
    """Columns of patches, a multiple of the merge size."""


@attrs.frozen(eq=False)
class Encoded:
    """One sample, ready to be packed."""

    name: str
    """The id in the file, or the file and line, for messages."""
    tokens: Int[np.ndarray, " tokens"]
    """Ids, int64."""
    supervised: Bool[np.ndarray, " tokens"]
    """Whether this token itself is a target (labels are shifted when packed, not here)."""
    runs: tuple[Run, ...]
    """Pictures and frames in the order of their tokens."""
    patches: Float[np.ndarray, "patches patch_dim"]
    """Their patches in the same order, merge block by merge block, float32."""


@attrs.frozen
class Geometry:
    """What packing has to know of a model's vision tower."""

    merge: int
    """Side of the block of patches that becomes one token."""
    side: int
    """Side of the square table of learned positions."""
    patch_dim: int
    """Values in a patch."""
