"""Random numbers as a function of a seed, a path and an index.

There is no stream with a state: element `i` of a leaf is a function of (seed, path, i). So values
depend neither on the order of calls nor on how a leaf is cut over ranks. All steps are integer
arithmetic and a table lookup, so they are equal to the last bit on every device and for every
cut, which a vectorised logarithm or cosine is not.
"""

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_TABLE_BITS = 16


def derive(seed: int, *names: str | int) -> int:
    """Give the 63-bit seed of the stream called `names` under `seed`."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def bits(seed: int | Tensor, index: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Hash each index under `seed` to 64 bits, as a signed integer; a seed may be an int64 tensor.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (SplitMix64). Products wrap.
    """
    start = seed if isinstance(seed, Tensor) else _signed(seed)
    value = (index.long() + 1) * _signed(0x9E3779B97F4A7C15) + start
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def uniform(seed: int | Tensor, index: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Give a float32 in [0, 1) for each index: multiples of 2**-24."""
    return _shift(bits(seed, index), 40).float() * 2**-24


def normal(
    seed: int, index: Int[Tensor, "*shape"], table: Float[Tensor, " entries"] | None = None
) -> Float[Tensor, "*shape"]:
    """Give a standard normal float32 for each index, one of 65,536 quantiles within 4.33.

    Who calls it often makes the `table` once, by `quantiles`.
    """
    entries = quantiles() if table is None else table
    return entries.to(index.device)[_shift(bits(seed, index), 64 - _TABLE_BITS)]


def flat_index(shape: Sequence[int], part: Sequence[slice]) -> Int[Tensor, "..."]:
    """Number the elements of `part` of a row-major tensor of `shape` as in the whole tensor."""
    index = torch.zeros((), dtype=torch.int64)
    for size, cut in zip(shape, part, strict=True):
        place = torch.arange(size)[cut]
        index = index[..., None] * size + place
    return index


def quantiles() -> Float[Tensor, " entries"]:
    """Make the table of normal quantiles."""
    place = torch.arange(2**_TABLE_BITS, dtype=torch.float64)
    table: Tensor = torch.special.ndtri((place + 0.5) / 2**_TABLE_BITS)
    return table.float()


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _shift(value: Tensor, by: int) -> Tensor:
    """Shift right without the sign, which torch's `>>` copies in."""
    return (value >> by) & ((1 << (64 - by)) - 1)
