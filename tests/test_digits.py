"""The embedded digits: no picture on both sides, right answers, the same samples for ever."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mmfn.data import digits, formats, media
from mmfn.data.sample import Sample, Text


def shown(sample: Sample) -> list[str]:
    """Give the pictures of a sample."""
    return [image.source for image in sample.images]


def words(sample: Sample, turn: int) -> str:
    """Give what is written in a turn."""
    return "".join(part.text for part in sample.turns[turn].parts if isinstance(part, Text))


def what_is_seen(sources: list[str]) -> list[int]:
    """Tell the digit of each picture, decoded as for training, by the nearest published array."""
    table = load_digits()
    found = []
    for source in sources:
        pixels = np.asarray(media.open_image(source, "."), dtype=np.float64)
        assert pixels.shape == (32, 32, 3)
        small = pixels[..., 0].reshape(8, 4, 8, 4).mean((1, 3)) * 16 / 255
        distance = ((table.images - small) ** 2).sum((1, 2))
        found.append(int(table.target[distance.argmin()]))
    return found


def test_no_held_out_picture_is_trained_on() -> None:
    """Whatever the seed; and all 1,797 pictures, no two alike, are on one side or the other."""
    held = {source for sample in digits.held_out() for source in shown(sample)}
    trained = set()
    for seed in (0, 1, 2):
        sources = {source for sample in digits.train(seed, 2876) for source in shown(sample)}
        assert len(sources) == 1438
        trained |= sources
    assert len(trained) == 1438
    assert len(held) == 359
    assert not trained & held


def test_held_out_is_each_picture_once_then_as_many_pairs_with_every_digit_alike() -> None:
    """A fifth of each digit, rounded."""
    samples = digits.held_out()
    assert [len(shown(sample)) for sample in samples] == [1] * 359 + [2] * 359
    assert len({shown(sample)[0] for sample in samples[:359]}) == 359
    counts = Counter(words(sample, 1) for sample in samples[:359])
    assert [counts[str(digit)] for digit in range(10)] == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_answers_are_what_the_pictures_show() -> None:
    """Every question fits the number of pictures, and two pictures never show the same digit."""
    samples = (*digits.train(3, 60), *digits.held_out()[350:370])
    seen = what_is_seen([source for sample in samples for source in shown(sample)])
    for sample in samples:
        count = len(shown(sample))
        found, seen = seen[:count], seen[count:]
        assert words(sample, 1) == str(max(found))
        assert len(set(found)) == count
        assert words(sample, 0) in (digits.ONE if count == 1 else digits.TWO)


def test_training_pictures_come_once_an_epoch_and_pairs_are_balanced() -> None:
    """The larger of two different digits, each equally likely, is `d` in `d` of 45 pairs."""
    samples = digits.train(0, 4 * 1438)
    single, pairs = samples[0::2], samples[1::2]
    assert {len(shown(s)) for s in single} == {1}
    assert {len(shown(s)) for s in pairs} == {2}
    first, second = [[shown(s)[0] for s in single[k : k + 1438]] for k in (0, 1438)]
    assert sorted(first) == sorted(second)
    assert first != second
    answers = Counter(int(words(s, 1)) for s in pairs)
    for digit in range(10):
        share = digit / 45
        # Five standard deviations of a binomial count.
        bound = 5 * (len(pairs) * share * (1 - share)) ** 0.5
        assert abs(answers[digit] - len(pairs) * share) <= bound
    asked = Counter(words(s, 0) for s in samples)
    assert asked.keys() == {*digits.ONE, *digits.TWO}
    assert min(asked.values()) > len(samples) / 8


def test_samples_are_a_function_of_seed_and_index() -> None:
    """More samples begin with the same ones; another seed gives others; names are unique."""
    few, many = digits.train(5, 7), digits.train(5, 300)
    assert few == many[:7]
    assert len({sample.name for sample in many}) == 300
    assert digits.train(6, 300) != many
    assert digits.held_out() == digits.held_out()


def test_varied_pictures_differ_each_time_and_ask_the_same() -> None:
    """Turned and moved a little: other bytes, questions and answers as they were."""
    plain, varied = digits.train(1, 60), digits.train(1, 60, vary=True)
    assert [words(s, 0) + words(s, 1) for s in plain] == [words(s, 0) + words(s, 1) for s in varied]
    sources = [source for sample in varied for source in shown(sample)]
    assert len(set(sources)) == len(sources) == 90
    assert not set(sources) & {source for sample in plain for source in shown(sample)}
    assert digits.train(1, 60, vary=True) == varied


def test_texts_hold_all_that_is_written() -> None:
    """A tokenizer made from them has seen every question, answer and role."""
    samples = (*digits.train(0, 400), *digits.held_out())
    written = {words(sample, turn) for sample in samples for turn in (0, 1)}
    assert written <= set(digits.texts())


def test_written_files_are_read_as_the_same_samples(tmp_path: Path) -> None:
    """But for the pictures, which are files then, with the same pixels."""
    folder = tmp_path / "digits"
    digits.write(folder, seed=2, count=9)
    assert sorted(path.name for path in folder.iterdir()) == [
        "held_out.json",
        "pictures",
        "train.json",
    ]
    for part, expected in (("train", digits.train(2, 9)), ("held_out", digits.held_out())):
        read = formats.read(folder / f"{part}.json")
        assert len(read) == len(expected)
        for mine, theirs in list(zip(expected, read, strict=True))[::40]:
            assert theirs.name == mine.name
            assert [words(theirs, t) for t in (0, 1)] == [words(mine, t) for t in (0, 1)]
            for one, other in zip(shown(mine), shown(theirs), strict=True):
                assert other.startswith("pictures/")
                pixels = [np.asarray(media.open_image(s, folder)) for s in (one, other)]
                np.testing.assert_array_equal(*pixels)


def test_a_wrong_count_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(ValueError, match="count=0, needs at least 1"):
        digits.train(0, 0)
    with pytest.raises(ValueError, match="count=-1, needs at least 1"):
        digits.write(tmp_path / "new", count=-1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.json").write_text("[]")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        digits.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
