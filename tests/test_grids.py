"""Positions of tokens and patches, and the resampling of the learned table."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from mmfn.data import grids
from mmfn.data.encoded import Run

# A: text, a picture of 4 by 6 patches, text, two frames of 4 by 4; B: the frames first.
RUNS_A = (Run(4, 4, 6), Run(16, 4, 4), Run(24, 4, 4))
RUNS_B = (Run(4, 4, 4), Run(12, 4, 4), Run(19, 4, 6))


def row(text: str) -> list[int]:
    """Read a list of integers."""
    return [int(word) for word in text.split()]


def test_positions_of_a_picture_then_frames() -> None:
    """Each frame is a grid of its own; what follows goes on after its longer side."""
    time, height, width = grids.positions(33, RUNS_A, 2)
    assert time.tolist() == row(
        "0 1 2 3 4 4 4 4 4 4 7 8 9 10 11 12 13 13 13 13 15 16 17 18 19 19 19 19 21 22 23 24 25"
    )
    assert height[4:10].tolist() == row("4 4 4 5 5 5")
    assert width[4:10].tolist() == row("4 5 6 4 5 6")
    assert height[16:20].tolist() == row("13 13 14 14")
    assert height[24:28].tolist() == row("19 19 20 20")
    assert width[16:20].tolist() == row("13 14 13 14")
    assert width[24:28].tolist() == row("19 20 19 20")
    text = [i for i in range(33) if i not in {*range(4, 10), *range(16, 20), *range(24, 28)}]
    assert (time[text] == height[text]).all()
    assert (time[text] == width[text]).all()
    assert time[-1] + 1 - 33 == -7


def test_positions_of_frames_then_a_picture() -> None:
    """The same parts in another order end at the same position."""
    time, *_ = grids.positions(30, RUNS_B, 2)
    assert (time[4], time[12], time[19]) == (4, 10, 15)
    assert time[-1] + 1 == 30 - 7


def test_positions_of_text_count_from_zero() -> None:
    """All three are alike."""
    assert grids.positions(5, (), 2).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert grids.positions(0, (), 2).shape == (3, 0)


def test_a_picture_may_fill_a_sample() -> None:
    """No text before or after it."""
    assert grids.positions(2, [Run(0, 4, 2)], 2).tolist() == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((Run(2, 4, 4), Run(5, 4, 4)), r"tokens 5\.\.9 does not fit in 6\.\.12"),
        ((Run(9, 4, 4),), r"tokens 9\.\.13 does not fit in 0\.\.12"),
    ],
)
def test_runs_that_overlap_or_leave_the_sample_are_refused(
    runs: tuple[Run, ...], message: str
) -> None:
    """Names the tokens of the run and those that are free."""
    with pytest.raises(ValueError, match=message):
        grids.positions(12, runs, 2)


sizes = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))


@given(sizes)
def test_patch_positions_are_those_of_transformers(size: tuple[int, int, int]) -> None:
    """Grids of up to 40 by 40 blocks of 1 to 3 patches."""
    rows, columns, merge = size
    theirs = get_vision_position_ids(torch.tensor([[1, rows * merge, columns * merge]]), merge)
    ours = grids.patch_positions(rows * merge, columns * merge, merge)
    np.testing.assert_array_equal(ours, theirs.T.numpy())


@given(sizes, st.sampled_from([2, 4, 16, 48]))
def test_places_are_those_of_transformers(size: tuple[int, int, int], side: int) -> None:
    """Entries and weights to the last bit, also for odd grids and sides of one patch."""
    rows, columns, merge = size
    entries, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, rows * merge, columns * merge]]),
        side,
        align_corners=True,
        spatial_merge_size=merge,
    )
    ours = grids.places(rows * merge, columns * merge, side, merge)
    np.testing.assert_array_equal(ours[0], entries.T.numpy())
    np.testing.assert_array_equal(ours[1], weights.T.numpy())
    assert ours[1].dtype == np.float32


def test_a_table_of_its_indices_is_resampled_with_corners_aligned() -> None:
    """A table of side 4 on a grid of 4 by 6, in merge-block order."""
    entries, weights = grids.places(4, 6, 4, 2)
    expected = (
        "0 .6 4 4.6 1.2 1.8 5.2 5.8 2.4 3 6.4 7 8 8.6 12 12.6 9.2 9.8 13.2 13.8 10.4 11 14.4 15"
    )
    # Two roundings of numbers up to 15 in float32, each of at most 15 * 2**-24.
    np.testing.assert_allclose(
        (entries * weights).sum(0), [float(x) for x in expected.split()], rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("size", [(3, 4), (4, 3), (0, 4)])
def test_a_grid_without_whole_blocks_is_refused(size: tuple[int, int]) -> None:
    """Before any table is made."""
    with pytest.raises(ValueError, match=f"a grid of {size[0]} by {size[1]} patches .* of 2"):
        grids.places(*size, 16, 2)
