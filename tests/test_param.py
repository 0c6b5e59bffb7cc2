"""Trees, weights without values, and values that depend on nothing but seed, path and index."""

from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmfn import param, rng, tree
from mmfn.models import qwen3_vl
from mmfn.models.presets import PRESETS
from mmfn.param import Param
from mmfn.tree import pytree


@pytree
class Pair:
    """Two leaves, of which the second may be absent."""

    a: Tensor
    b: Tensor | None = None


def test_trees_are_built_mapped_and_evolved_in_a_compiled_function(no_shape_checks: None) -> None:
    """With `fullgraph`: nothing of them breaks the graph."""

    def work(x: Tensor) -> Pair:
        pair = tree.map(lambda leaf: leaf + 1, Pair(x, b=x * 2))
        return tree.evolve(pair, a=pair.a * 3)

    made = torch.compile(work, fullgraph=True, backend="aot_eager")(torch.ones(2))
    assert torch.equal(made.a, torch.full((2,), 6.0))
    assert torch.equal(made.b, torch.full((2,), 3.0))


def test_paths_partition_and_combine() -> None:
    """Halves have no leaf of the other, and together they are the whole."""
    whole = tiny.params()
    kept, rest = tree.partition(lambda path, leaf: "layers.1." in path, whole)
    assert all("layers.1." in path for path in tree.paths(kept))
    assert sorted(tree.paths(kept) + tree.paths(rest)) == sorted(tree.paths(whole))
    again = tree.combine(kept, rest)
    assert all(a is b for a, b in zip(tree.leaves(again), tree.leaves(whole), strict=True))
    with pytest.raises(ValueError, match="both trees have a leaf"):
        tree.combine(kept, whole)


def test_wrong_fields_and_structures_are_refused_by_name() -> None:
    """Unknown, missing and surplus fields; trees of other structure; a wrong number of values."""
    make: Any = Pair  # A checker of types would refuse both, too.
    with pytest.raises(TypeError, match="Pair has no free field 'c'"):
        make(torch.ones(1), c=1)
    with pytest.raises(TypeError, match="Pair lacks field 'a'"):
        make()
    with pytest.raises(TypeError, match="no field 'c'"):
        tree.evolve(Pair(torch.ones(1)), c=1)
    with pytest.raises(ValueError, match="differ in structure"):
        tree.map(torch.add, Pair(torch.ones(1)), Pair(torch.ones(1), torch.ones(1)))
    with pytest.raises(ValueError, match="a tree of 1 leaves cannot hold 2 values"):
        tree.unflatten(Pair(torch.ones(1)), [1, 2])
    with pytest.raises(AttributeError):
        Pair(torch.ones(1)).a = torch.ones(2)


def test_a_layout_says_how_a_leaf_was_published() -> None:
    """Parentheses join axes; an axis without a name in the vocabulary is refused."""
    leaf = Param((2, 3, 4, 5), "(kv_heads groups head_dim) embed", "w")
    assert leaf.axes == ("kv_heads", "groups", "head_dim", "embed")
    assert leaf.pieces()[0].fused == ((0, 1, 2), (3,))
    assert leaf.published == (24, 5)
    with pytest.raises(ValueError, match="no axis is called 'embd'; there are vocab, embed"):
        Param((2,), "embd", "w")
    with pytest.raises(ValueError, match="and shape"):
        Param((2, 3), "embed", "w")


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), min_size=4, max_size=4),
    seed=st.integers(0, 2**40),
)
def test_any_part_of_a_leaf_is_that_part_of_the_whole(
    shape: tuple[int, ...], cuts: list[tuple[int, int]], seed: int
) -> None:
    """Bit for bit, for any cut, also an empty one."""
    axes = ["vocab", "embed", "mlp", "head_dim"][: len(shape)]
    leaf = Param(shape, " ".join(axes), "w", spread=0.3, mean=0.1)
    part = tuple(slice(a, max(a, b)) for a, b in cuts[: len(shape)])
    whole = param.init((leaf,), seed)[0]
    cut = param.init((leaf,), seed, place=lambda path, p: (part, lambda value: value))[0]
    assert torch.equal(cut, whole[part])


def test_initial_values_have_their_spread_and_differ_by_path_and_seed() -> None:
    """Mean and spread to four standard errors; norms are ones, biases zeros."""
    leaf = Param((400, 500), "mlp embed", "w", spread=0.02)
    first, second = param.init((leaf, leaf), 0)
    other = param.init((leaf, leaf), 1)[0]
    for made in (first, second, other):
        assert abs(made.mean().item()) < 4 * 0.02 / 200_000**0.5
        assert made.std().item() == pytest.approx(0.02, rel=0.01)
        assert made.abs().max() < 0.02 * 4.4
    for a, b in ((first, second), (first, other)):
        assert abs((a * b).mean().item() / 0.02**2) < 4 / 200_000**0.5
    params = param.init(qwen3_vl.abstract(tiny.CONFIG), 0)
    assert (params.text.head.norm == 1).all()
    assert (params.vision.layers[0].qkv.bias == 0).all()


def test_random_numbers_are_uniform_and_normal() -> None:
    """Moments of a million; an index gives the same whatever it is asked beside."""
    index = torch.arange(1_000_000)
    flat, bell = rng.uniform(5, index), rng.normal(5, index)
    assert flat.min() >= 0
    assert flat.max() < 1
    assert flat.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert bell.mean().item() == pytest.approx(0.0, abs=4e-3)
    assert (bell**4).mean().item() == pytest.approx(3.0, abs=0.05)
    assert torch.equal(bell[777:999], rng.normal(5, index[777:999]))
    assert rng.derive(1, "a", "b") != rng.derive(1, "ab") != rng.derive(2, "ab")


def test_a_table_has_a_row_for_layers_alike() -> None:
    """And the total, with its thousands apart."""
    text = param.table(qwen3_vl.abstract(PRESETS["2B"]))
    assert text.splitlines()[-1].split() == ["total", "2,127,532,032"]
    assert sum("text.layers.*.attention.q " in line for line in text.splitlines()) == 1
