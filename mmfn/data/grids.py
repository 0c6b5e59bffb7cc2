"""What follows from the grids of pictures: positions of tokens and patches, and resampling tables.

All of it is integer work on the host, done once when a batch is made. Patches are in merge-block
order: the `merge²` patches of one token follow each other, blocks go row by row.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from mmfn.data.encoded import Run


def positions(tokens: int, runs: Sequence[Run], merge: int) -> Int[np.ndarray, "3 tokens"]:
    """Give time, row and column of each token of a sample (MRoPE).

    Text advances by one in all three; a picture or frame is a grid that starts where the text
    before it ended, and what follows goes on after its longer side.

    Source: Wang et al. 2024, arXiv:2409.12191, section 2.1; frames apart as in arXiv:2511.21631.

    Raises:
        ValueError: runs overlap or go beyond the sample.
    """
    result = np.empty((3, tokens), dtype=np.int64)
    here = start = 0
    for run in runs:
        rows, columns = run.height // merge, run.width // merge
        stop = run.start + rows * columns
        if run.start < here or stop > tokens:
            raise ValueError(
                f"a run of tokens {run.start}..{stop} does not fit in {here}..{tokens}"
            )
        text = run.start - here
        result[:, here : run.start] = start + np.arange(text)
        start += text
        result[0, run.start : stop] = start
        result[1, run.start : stop] = start + np.repeat(np.arange(rows), columns)
        result[2, run.start : stop] = start + np.tile(np.arange(columns), rows)
        start += max(rows, columns)
        here = stop
    result[:, here:] = start + np.arange(tokens - here)
    return result


def patch_positions(height: int, width: int, merge: int) -> Int[np.ndarray, "2 patches"]:
    """Give row and column of each patch of a frame of `height` by `width` patches."""
    if height % merge or width % merge or height < 1 or width < 1:
        raise ValueError(f"a grid of {height} by {width} patches has no blocks of {merge}")
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    blocks = np.stack([rows, columns]).reshape(2, height // merge, merge, width // merge, merge)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)


def places(
    height: int, width: int, side: int, merge: int
) -> tuple[Int[np.ndarray, "4 patches"], Float[np.ndarray, "4 patches"]]:
    """Resample a square table of `side²` entries to a frame: bilinear, corners aligned.

    Gives the four entries of each patch and their weights, float32.
    """
    row, column = patch_positions(height, width, merge)
    (top, bottom, down), (left, right, across) = (
        _neighbours(size, side, place) for size, place in ((height, row), (width, column))
    )
    entries = np.stack(
        [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    )
    # 1 - (1 - x) is not x in float32; the published code weighs the second neighbour by it.
    rows, columns = ((1 - far, 1 - (1 - far)) for far in (down, across))
    return entries, np.stack([row * column for row in rows for column in columns])


def _neighbours(size: int, side: int, place: np.ndarray) -> tuple[np.ndarray, ...]:
    """Entries before and after each place along one side, and how far between them it lies."""
    # Rounded to float32 step by step, as the published code does, so that weights are the same.
    at = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = at.astype(np.int64)
    return low, np.minimum(low + 1, side - 1), at - low.astype(np.float32)
