"""Samples to batches: what each field of a batch holds, and what a loss is divided by."""

import attrs
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmfn import losses, tree
from mmfn.batch import Batch
from mmfn.data import grids, pack
from mmfn.data.encoded import Encoded, Geometry, Run

GEOMETRY = Geometry(merge=2, side=4, patch_dim=3)


def sample(name: str, tokens: int, supervised: str = "", runs: tuple[Run, ...] = ()) -> Encoded:
    """Make a sample of tokens 1, 2, 3, … whose targets are marked by `x`."""
    patches = sum(run.height * run.width for run in runs)
    return Encoded(
        name=name,
        tokens=np.arange(1, tokens + 1),
        supervised=np.array([mark == "x" for mark in supervised.ljust(tokens)]),
        runs=runs,
        patches=np.arange(3.0 * patches, dtype=np.float32).reshape(-1, 3) + len(name),
    )


def collate(
    *rows: list[Encoded], tokens: int = 16, normalise: losses.Normalise = "token"
) -> tuple[Batch, pack.Counts]:
    """Pack with small buckets."""
    return pack.collate(
        rows,
        geometry=GEOMETRY,
        tokens=tokens,
        normalise=normalise,
        least_patches=4,
        least_targets=2,
        least_segments=2,
    )


def test_samples_stand_one_after_the_other_and_padding_at_the_end() -> None:
    """Two rows of 6 tokens are one of 12; its tail is a segment of its own."""
    batch, counts = collate([sample("a", 2), sample("b", 3)], [sample("c", 4)], tokens=6)
    assert batch.tokens.tolist() == [1, 2, 1, 2, 3, 1, 2, 3, 4, 0, 0, 0]
    assert batch.segments.number.tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0]
    assert batch.segments.ends.tolist() == [2, 5, 9, 12]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 0]] * 3
    assert (counts.tokens, counts.samples) == (9, 3)


def test_samples_that_fill_a_row_have_no_tail() -> None:
    """The last end is repeated up to a power of two."""
    batch, _ = collate([sample("a", 2), sample("b", 4), sample("c", 2)], tokens=8)
    assert batch.segments.number.tolist() == [1, 1, 2, 2, 2, 2, 3, 3]
    assert batch.segments.ends.tolist() == [2, 6, 8, 8]


@given(st.lists(st.integers(1, 9), max_size=7), st.integers(0, 5), st.integers(1, 4))
def test_ends_and_numbers_say_the_same(lengths: list[int], tail: int, least: int) -> None:
    """Attention reads the ends on the host or the numbers on the device."""
    total = max(1, sum(lengths) + tail)
    batch, _ = pack.collate(
        [[sample(str(i), n) for i, n in enumerate(lengths)]],
        geometry=GEOMETRY,
        tokens=total,
        least_segments=least,
    )
    ends, number = batch.segments.ends, batch.segments.number
    assert ends.dtype == torch.int32
    assert ends[-1] == total
    assert len(ends) % least == 0
    places = torch.arange(total)
    of_ends = torch.searchsorted(ends.long().unique(), places, right=True) + 1
    used = sum(lengths)
    assert torch.equal(number, torch.where(places < used, of_ends, 0).to(number.dtype))


def test_the_target_at_a_place_is_the_next_token_of_its_sample() -> None:
    """The first token of a sample is never a target, nor is one predicted over a border."""
    batch, counts = collate([sample("a", 3, "x x"), sample("b", 4, "xx x")], tokens=8)
    assert batch.at.tolist() == [1, 3, 5]
    assert batch.targets.tolist() == [3, 2, 4]
    assert batch.weights.tolist() == [1, 1, 1]
    assert counts.supervised == 3


def test_targets_are_padded_with_the_first_place_and_no_weight() -> None:
    """One target in a list of two."""
    batch, _ = collate([sample("a", 3, "  x")])
    assert batch.at.tolist() == [1, 0]
    assert batch.targets.tolist() == [3, 0]
    assert batch.weights.tolist() == [1, 0]


def test_unshifted_targets_would_be_seven() -> None:
    """Seven tokens, all supervised, are six targets."""
    _, counts = collate([sample("T", 7, "xxxxxxx")])
    assert counts.supervised == 6


@pytest.mark.parametrize(
    ("normalise", "weights", "divisor"),
    [
        ("token", [1, 1, 1, 1, 1, 1], 6),
        ("sample", [1 / 3, 1 / 3, 1 / 3, 1, 1 / 2, 1 / 2], 3),
        ("row", [1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2], 2),
    ],
)
def test_losses_are_means_of_targets_samples_or_rows(
    normalise: losses.Normalise, weights: list[float], divisor: int
) -> None:
    """Three targets and one in the first row, none and two in the second, none in the third."""
    batch, counts = collate(
        [sample("a", 4, " xxx"), sample("b", 2, " x")],
        [sample("c", 3), sample("d", 5, "  xx")],
        [sample("e", 5)],
        normalise=normalise,
    )
    torch.testing.assert_close(batch.weights, torch.tensor(weights).float())
    assert counts.divisor(normalise) == divisor


def test_the_count_of_a_step_is_that_of_all_its_micro_batches() -> None:
    """Of 3 and 1 targets, and of none: each loss is divided by 4."""
    made = [collate([sample("a", 4, " xxx")]), collate([sample("b", 2, " x")]), collate([])]
    counts = pack.total([counts for _, counts in made])
    batches = pack.with_count([batch for batch, _ in made], counts.divisor("token"))
    assert [batch.count.item() for batch in batches] == [4, 4, 4]
    assert all(batch.count.dtype == torch.float32 for batch in batches)
    assert (counts.tokens, counts.samples, counts.answered, counts.rows) == (6, 2, 2, 2)


@pytest.mark.parametrize("normalise", ["token", "sample", "row"])
def test_a_step_without_targets_is_divided_by_one(normalise: losses.Normalise) -> None:
    """Its loss is 0, never 0 / 0."""
    batch, counts = collate([sample("a", 4)], [], normalise=normalise)
    assert counts.divisor(normalise) == 1
    assert batch.weights.sum() == 0
    assert batch.weights.isfinite().all()


RUNS_B, RUNS_C = (Run(1, 4, 2), Run(4, 2, 2)), (Run(0, 2, 4),)


def test_each_token_of_a_picture_knows_its_feature() -> None:
    """Features count on over the samples, in the order of their patches; -1 is text."""
    batch, counts = collate(
        [sample("a", 2), sample("b", 6, runs=RUNS_B)], [sample("c", 3, runs=RUNS_C)]
    )
    expected = [-1, -1, -1, 0, 1, -1, 2, -1, 3, 4, -1]
    assert batch.feature.tolist() == expected + [-1] * 21
    assert counts.patches == 20


def test_patches_are_joined_with_their_positions_frame_by_frame() -> None:
    """A picture or frame is a segment; the padding after them is one too, with weights of 0."""
    samples = [sample("bb", 6, runs=RUNS_B), sample("c", 3, runs=RUNS_C)]
    media = collate(samples)[0].media
    runs = [*RUNS_B, *RUNS_C]
    assert media.segments.ends.tolist() == [8, 12, 20] + [20] * (len(media.segments.ends) - 3)
    assert torch.equal(media.segments.number, torch.tensor([1] * 8 + [2] * 4 + [3] * 8).int())
    np.testing.assert_array_equal(media.patches, np.concatenate([s.patches for s in samples]))
    positions = [grids.patch_positions(run.height, run.width, 2) for run in runs]
    np.testing.assert_array_equal(media.positions, np.concatenate(positions, 1))
    entries, weights = zip(
        *(grids.places(run.height, run.width, 4, 2) for run in runs), strict=True
    )
    np.testing.assert_array_equal(media.places, np.concatenate(entries, 1))
    np.testing.assert_array_equal(media.blend, np.concatenate(weights, 1))


def test_padding_of_patches_is_a_segment_of_zeros() -> None:
    """Eight patches in a buffer of twelve."""
    media = pack.collate(
        [[sample("c", 3, runs=RUNS_C)]], geometry=GEOMETRY, tokens=4, least_patches=12
    )[0].media
    assert media.segments.number.tolist() == [1] * 8 + [0] * 4
    assert media.segments.ends.tolist() == [8] + [12] * 15
    assert not media.patches[8:].any()
    assert not media.blend[:, 8:].any()
    torch.testing.assert_close(media.blend[:, :8].sum(0), torch.ones(8))


@pytest.mark.parametrize("rows", [[[]], [[sample("a", 3)]]])
def test_a_batch_without_pictures_has_a_block_of_padding(rows: list[list[Encoded]]) -> None:
    """So that the tower runs on every rank; nothing of it is read."""
    batch, counts = collate(*rows)
    media = batch.media
    assert media.patches.shape == (4, 3)
    assert media.segments.ends.unique().tolist() == [4]
    assert not media.segments.number.any()
    assert counts.patches == 0
    assert (batch.feature == -1).all()


@given(st.integers(0, 10**7), st.integers(1, 512))
def test_sizes_are_rounded_up_to_few(size: int, least: int) -> None:
    """A size is a size of its own; four from one power of two to the next."""
    rounded = pack.bucket(size, least)
    assert rounded >= max(size, least)
    assert pack.bucket(rounded, least) == rounded
    if size > 2 * least:
        assert rounded < 1.25 * size + 1
    octave = {pack.bucket(n, 64) for n in range(64 * 64 + 1, 64 * 128 + 1, 16)}
    assert len(octave) <= 5


def test_patches_are_padded_to_whole_blocks() -> None:
    """A bucket that is no multiple of a block is rounded up to one."""
    made = pack.collate([[]], geometry=GEOMETRY, tokens=4, least_patches=6)[0]
    assert made.media.patches.shape == (8, 3)


def test_the_split_in_rows_changes_nothing_but_padding() -> None:
    """Where the loss is the mean of targets."""
    samples = [tiny.encoded("A"), tiny.encoded("T"), tiny.encoded("B")]
    one, _ = pack.collate([samples], geometry=tiny.GEOMETRY, tokens=80)
    two, _ = pack.collate([samples[:2], samples[2:]], geometry=tiny.GEOMETRY, tokens=40)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True))


def test_samples_are_packed_with_their_own_positions() -> None:
    """Picture then frames, text, frames then picture: as if each stood alone."""
    samples = [tiny.encoded(name) for name in "ATB"]
    batch, counts = pack.collate([samples], geometry=tiny.GEOMETRY, tokens=70)
    alone = [pack.collate([[s]], geometry=tiny.GEOMETRY, tokens=len(s.tokens))[0] for s in samples]
    assert torch.equal(batch.positions, torch.cat([one.positions for one in alone], 1))
    assert batch.positions[:, -1].tolist() == [22, 22, 22]
    assert (counts.tokens, counts.supervised) == (70, 12 + 6 + 9)


def bad(**changes: object) -> Encoded:
    """Make a sample with a picture that has something wrong."""
    return attrs.evolve(sample("s", 4, runs=RUNS_C), **changes)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (sample("s", 0), "sample s has no token"),
        (sample("s", 17), r"a row of 17 tokens \(s.*\) is longer than tokens=16"),
        (bad(runs=(Run(0, 2, 2),)), "sample s has 8 patches; its runs need 4"),
        (bad(patches=np.zeros((8, 5), np.float32)), "sample s has patches of 5 .* takes 3"),
        (bad(runs=(Run(3, 2, 4),)), r"sample s: a run of tokens 3\.\.5 does not fit in 0\.\.4"),
        (
            bad(runs=(Run(0, 1, 8),)),
            "sample s has a grid of 1 by 8 patches, which has no blocks of 2",
        ),
        (bad(supervised=np.array([False, True, False, False])), "sample s supervises token 1"),
        (bad(supervised=np.zeros(3, bool)), "sample s has 4 tokens and 3 labels"),
    ],
)
def test_samples_that_contradict_themselves_are_refused(broken: Encoded, message: str) -> None:
    """Names the sample and both numbers."""
    with pytest.raises(ValueError, match=message):
        collate([broken])
