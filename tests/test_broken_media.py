"""Pictures that are corrupt, missing or no pictures, from the file to the steps of two ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toys import on_ranks

from mmfn.data import chat, formats, tokenizer
from mmfn.data.chat import Chat
from mmfn.data.encoded import Geometry
from mmfn.data.loader import Loader
from mmfn.data.media import Pixels
from mmfn.data.plan import Plan
from mmfn.data.sample import BadSample
from mmfn.data.scan import Policy, scan

CASES = Path(__file__).parent / "data" / "cases"
PLAN = Plan(tokens=64, rows=1, accumulate=1, ranks=2, epochs=1, seed=0)
SKIP = Policy(on_bad="skip", max_bad=0.5)


def load(policy: Policy, *, workers: int, **changes: Any) -> Loader:
    """Read four good and four broken pictures with a tokenizer of ours."""
    made = tokenizer.build(["user assistant Q0 A0"], 300)
    pixels = Pixels(16, 2, 2, 1024, 16384, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    settings = Chat(made, pixels, chat.special_of(made), PLAN.tokens)
    samples = formats.read(CASES / "d08_broken_media.json")
    measure = partial(chat.measure, chat=settings, root=CASES)
    encode = partial(chat.encode, chat=settings, root=CASES)
    found = scan(samples, measure, tokens=PLAN.tokens, policy=policy, workers=workers)
    geometry = Geometry(pixels.merge, 4, pixels.patch_dim)
    return Loader(samples, encode, found, PLAN, geometry, policy, workers=workers, **changes)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_pictures_are_skipped_and_counted_on_both_ranks(workers: int) -> None:
    """Four of eight are kept, and both ranks make the same number of steps."""
    made = load(SKIP, workers=0)
    first, second = on_ranks(partial(load, SKIP, workers=workers))
    assert len(first) == len(second) == len(made)
    assert sum(step.counts.samples for step in first) == 4
    problems = [text for of in (first, second) for step in of for text in step.problems]
    assert sum(step.dropped for step in second) == len(problems)
    named = " ".join([*made.scan.bad, *problems])
    assert len(made.scan.bad) + len(problems) == 4
    for name in ("truncated.jpg", "not_image.jpg", "empty.jpg", "missing_file.png"):
        assert named.count(name) == 1


def test_more_broken_pictures_than_allowed_end_the_run() -> None:
    """Four of eight, where a quarter may be; at the latest when they are decoded."""
    policy = Policy(on_bad="skip", max_bad=0.25)
    with pytest.raises(ValueError, match=r"3 of 8 samples are bad, more than max_bad=0\.25"):
        load(policy, workers=0)


def test_a_broken_picture_is_named_at_once() -> None:
    """With the file of samples, the id and the picture."""
    with pytest.raises(BadSample, match=r"d08_broken_media.json\[\d\], id '\d'.*(jpg|png)"):
        load(Policy(), workers=2)
