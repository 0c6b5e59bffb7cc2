"""Measuring all samples, and leaving out those that cannot be used."""

from typing import Any

import pytest
from toys import Toy, measure, scanned

from mmfn.data.sample import BadSample
from mmfn.data.scan import Policy, scan


def test_a_scan_measures_all_samples_and_reports_how_far_it_is() -> None:
    """The same from two workers."""
    toys = tuple(Toy(n, 4 + n % 9) for n in range(150))
    reports: list[tuple[int, int]] = []
    found = [
        scan(
            toys,
            measure,
            tokens=32,
            policy=Policy(),
            workers=workers,
            progress=lambda *report: reports.append(report),
        )
        for workers in (0, 2)
    ]
    for one in found:
        assert one.kept.tolist() == list(range(150))
        assert one.tokens.tolist() == [toy.tokens for toy in toys]
        assert one.patches.tolist() == [8] * 150
        assert one.supervised.tolist() == [1] * 150
    assert reports == [(64, 150), (128, 150), (150, 150)] * 2


def test_a_scan_drops_long_samples_or_names_the_first() -> None:
    """33 tokens do not fit a row of 32."""
    toys = (Toy(0, 5), Toy(1, 33), Toy(2, 32))
    message = "toys.json, id 'toy1': 33 tokens are more than max_tokens=32"
    dropped = scanned(toys)
    assert (dropped.kept.tolist(), dropped.long, dropped.total) == ([0, 2], (message,), 3)
    with pytest.raises(BadSample) as caught:
        scanned(toys, Policy())
    assert str(caught.value) == message


def test_a_scan_that_leaves_nothing_is_refused() -> None:
    """Says what became of the samples."""
    with pytest.raises(ValueError, match="no sample is left: 1 are too long, 0 are bad"):
        scanned((Toy(0, 33),))


def test_a_scan_skips_bad_samples_or_names_the_first() -> None:
    """One of two, and the rest is read."""
    toys = (Toy(0, 5, bad="measure"), Toy(1, 5))
    message = "toys.json, id 'toy0': its header is broken"
    found = scanned(toys)
    assert (found.kept.tolist(), found.bad, found.long) == ([1], (message,), ())
    with pytest.raises(BadSample) as caught:
        scanned(toys, Policy())
    assert str(caught.value) == message


def test_a_scan_gives_up_above_the_limit() -> None:
    """Two of three are more than half."""
    toys = (Toy(0, 5, bad="measure"), Toy(1, 5), Toy(2, 5, bad="measure"))
    message = "2 of 3 samples are bad, more than max_bad=0.5; last toys.json, id 'toy2': its"
    with pytest.raises(ValueError, match=message):
        scanned(toys)


def test_a_row_that_is_not_understood_is_a_bad_sample() -> None:
    """Such samples raise when they are looked up."""

    class Rows(tuple[Toy, ...]):
        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                raise BadSample("rows.json[1]", "rows.json[1]", "the row is null")
            return super().__getitem__(index)

    found = scanned(Rows([Toy(0, 5), Toy(1, 5), Toy(2, 5)]))
    assert (found.kept.tolist(), found.bad) == ([0, 2], ("rows.json[1]: the row is null",))


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_limit_that_is_no_share_is_refused(share: float) -> None:
    """Names it."""
    with pytest.raises(ValueError, match=f"max_bad={share} is no share between 0 and 1"):
        Policy(max_bad=share)
