"""Handwritten digits as chat samples: data that every install has, for first runs and for tests.

The 1,797 pictures of scikit-learn, 8×8 grey, are enlarged to 32×32. Half of the samples show one
and ask for it, half show two different digits and ask for the larger. A fifth of the pictures of
each digit is held out, the same for every seed, and no training sample shows one of them. Pictures
are data URLs, so they take the ordinary way from PNG to patches.

Source: Alpaydin and Kaynak 1998, doi:10.24432/C50P49 (the test part), as in `load_digits`.
"""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image as Pictures
from sklearn.datasets import load_digits

from mmfn import files, rng
from mmfn.data.sample import Image, Sample, Text, Turn

SIDE = 32
"""Height and width of a picture in pixels."""

HELD_OUT = 5
"""One picture of so many is held out."""

ONE = (
    "Which digit is this?",
    "Which digit does the picture show?",
    "Read the digit.",
)
"""What is asked about one picture."""

TURN, MOVE = 10, 2
"""Largest turn of a training picture in degrees, and move in pixels of 32 each way."""

TWO = (
    "Which of the two is larger?",
    "Which of the two digits is larger?",
    "Name the larger digit.",
)
"""What is asked about two."""


@attrs.frozen(eq=False)
class _Digits:
    """All pictures, what they show, and which are trained on."""

    images: UInt8[np.ndarray, "pictures height width"]
    digit: Int[np.ndarray, " pictures"]
    train: Int[np.ndarray, " train"]
    """Indices of pictures, in ascending order, like those held out."""
    held_out: Int[np.ndarray, " held_out"]
    dark: bool = False
    """Whether they are shown dark on light."""

    def url(self, image: UInt8[np.ndarray, "height width"]) -> str:
        """Write a picture as it is shown."""
        return _url(255 - image if self.dark else image)


def train(seed: int, count: int, *, vary: bool = False, dark: bool = False) -> tuple[Sample, ...]:
    """Make `count` training samples; the first of them do not depend on how many there are.

    Even ones show one picture: all 1,438 in an order of the seed, then all in another order. Odd
    ones show a random pair, whose two digits are any two with equal probability, in any order. With
    `vary` each picture is turned and moved a little, each time another way; `dark` shows them dark
    on light.

    Raises:
        ValueError: `count` is below 1.
    """
    return _train(seed, count, attrs.evolve(_read(), dark=dark), None, vary=vary)


def held_out(*, dark: bool = False) -> tuple[Sample, ...]:
    """Give the samples to measure with: each picture held out once, then as many random pairs."""
    return _held_out(attrs.evolve(_read(), dark=dark), None)


def texts() -> tuple[str, ...]:
    """Give all that is written in a sample, the names of the roles too: what a tokenizer needs."""
    return (*ONE, *TWO, *map(str, range(10)), "system\n", "user\n", "assistant\n")


def write(folder: Path | str, *, seed: int = 0, count: int = 2876) -> None:
    """Write the same samples as files, the way data of one's own are laid out.

    `train.json` and `held_out.json` have the LLaVA form, and name the pictures relative to the
    folder, which is their media root.

    Raises:
        ValueError: `count` is below 1, or the folder is there and is not empty.
    """
    digits = _read()
    names = [f"pictures/{index:04d}.png" for index in range(len(digits.images))]
    parts = {"train": _train(seed, count, digits, names), "held_out": _held_out(digits, names)}
    with files.new_folder(Path(folder)) as partial:
        (partial / "pictures").mkdir()
        for name, image in zip(names, digits.images, strict=True):
            (partial / name).write_bytes(_png(image))
        for part, samples in parts.items():
            rows = [_row(sample) for sample in samples]
            files.write_json(partial / f"{part}.json", rows)


def _read() -> _Digits:
    found = load_digits()
    # Grey from 0 to 16.
    grey = np.round(found.images * (255 / 16)).astype(np.uint8)
    size = (SIDE, SIDE)
    images = [Pictures.fromarray(g).resize(size, Pictures.Resampling.BICUBIC) for g in grey]
    digit = found.target.astype(np.int64)
    order = np.argsort(_draw(0, "held out", len(digit)), kind="stable")
    held: list[int] = []
    for value in range(10):
        alike = order[digit[order] == value]
        held.extend(alike[: round(len(alike) / HELD_OUT)].tolist())
    return _Digits(
        images=np.stack([np.asarray(image) for image in images]),
        digit=digit,
        train=np.setdiff1d(np.arange(len(digit)), held),
        held_out=np.sort(np.array(held)),
    )


def _train(
    seed: int, count: int, digits: _Digits, names: Sequence[str] | None, *, vary: bool = False
) -> tuple[Sample, ...]:
    if count < 1:
        raise ValueError(f"count={count}, needs at least 1")
    single, pairs = -(-count // 2), count // 2
    rounds = range(-(-single // len(digits.train)))
    orders = [
        np.argsort(_draw(seed, f"order {r}", len(digits.train)), kind="stable") for r in rounds
    ]
    shown: list[tuple[int, ...]] = [()] * count
    shown[0::2] = [(int(i),) for i in digits.train[np.concatenate(orders)[:single]]]
    shown[1::2] = _pairs(seed, pairs, digits.train, digits.digit)
    wording = _draw(seed, "wording", count)
    varied = partial(_varied, seed=seed) if vary else None
    return _samples("train", shown, wording, digits, names, varied)


def _varied(image: UInt8[np.ndarray, "height width"], seed: int, place: str) -> Any:
    """Turn and move a picture by what is drawn for its place in the samples."""
    turn, right, down = (_draw(seed, f"vary {place}", 3) % 2001 / 1000 - 1).tolist()
    moved = Pictures.fromarray(image).rotate(
        TURN * turn,
        Pictures.Resampling.BICUBIC,
        translate=(round(MOVE * right), round(MOVE * down)),
    )
    return np.asarray(moved)


def _held_out(digits: _Digits, names: Sequence[str] | None) -> tuple[Sample, ...]:
    shown: list[tuple[int, ...]] = [(int(index),) for index in digits.held_out]
    shown += _pairs(0, len(shown), digits.held_out, digits.digit)
    return _samples("held_out", shown, np.arange(len(shown)), digits, names)


def _pairs(
    seed: int, count: int, among: Int[np.ndarray, " among"], digit: Int[np.ndarray, " pictures"]
) -> list[tuple[int, ...]]:
    """Draw pairs of different digits, then a picture of each."""
    first = _draw(seed, "first digit", count) % 10
    second = (first + 1 + _draw(seed, "second digit", count) % 9) % 10
    alike = [among[digit[among] == value] for value in range(10)]
    columns = []
    for name, values in (("first picture", first), ("second picture", second)):
        drawn = _draw(seed, name, count)
        columns.append(
            [int(alike[v][d % len(alike[v])]) for v, d in zip(values, drawn, strict=True)]
        )
    return list(zip(*columns, strict=True))


def _samples(
    part: str,
    shown: Sequence[tuple[int, ...]],
    wording: Int[np.ndarray, " samples"],
    digits: _Digits,
    names: Sequence[str] | None,
    varied: Callable[..., Any] | None = None,
) -> tuple[Sample, ...]:
    """Ask about each tuple of pictures; without names of files, pictures are data URLs."""
    sources = names or [digits.url(image) for image in digits.images]
    samples = []
    for index, (pictures, word) in enumerate(zip(shown, wording, strict=True)):
        asked = ONE if len(pictures) == 1 else TWO
        if varied is None:
            images = tuple(Image(sources[picture]) for picture in pictures)
        else:
            images = tuple(
                Image(digits.url(varied(digits.images[picture], place=f"{index} {number}")))
                for number, picture in enumerate(pictures)
            )
        question = Turn("user", (*images, Text(asked[word % len(asked)])))
        answer = Turn("assistant", (Text(str(max(digits.digit[p] for p in pictures))),))
        name = f"digits.{part}[{index}]"
        samples.append(Sample(name, name, (question, answer)))
    return tuple(samples)


def _row(sample: Sample) -> dict[str, Any]:
    """Write a sample in the LLaVA form: a mark stands where the picture stands."""
    sources = [image.source for image in sample.images]
    turns = []
    for turn in sample.turns:
        words = [part.text if isinstance(part, Text) else "<image>" for part in turn.parts]
        speaker = "human" if turn.role == "user" else "gpt"
        turns.append({"from": speaker, "value": "".join(words)})
    image = sources[0] if len(sources) == 1 else sources
    return {"id": sample.name, "image": image, "conversations": turns}


def _png(image: UInt8[np.ndarray, "height width"]) -> bytes:
    file = io.BytesIO()
    Pictures.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _url(image: UInt8[np.ndarray, "height width"]) -> str:
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _draw(seed: int, name: str, count: int) -> Int[np.ndarray, " count"]:
    """Draw `count` integers in [0, 2**62), the first of them whatever the count."""
    drawn: np.ndarray = rng.bits(rng.derive(seed, "digits", name), torch.arange(count)).numpy()
    return drawn & (2**62 - 1)
