"""What moves between ranks in a step, counted for up to 512 of them on groups that move nothing.

`docs/sharding.md` has the formulas.
"""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch.distributed as dist
from torch import Tensor

from mmfn import param, tree
from mmfn.compute import Compute
from mmfn.models import qwen3_vl
from mmfn.sharding import context, layout, parallel
from mmfn.sharding import mesh as meshes
from mmfn.sharding import rules as tables
from mmfn.sharding.axes import Axis
from mmfn.sharding.parallel import Parallel
from mmfn.transforms import value_and_grad

CFG = tiny.CONFIG
BLOCKS = CFG.layers + CFG.vision.layers
SINGLE = 2 + (1 + len(CFG.vision.deepstack)) + 3
"""Weights outside of blocks: patches, places; mergers; embedding, last norm, head."""


def _counted(text: str, world: int, options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Count calls and bytes that rank 0 gives to them, by axis and kind."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def note(name: str, axis: Axis, x: Tensor) -> None:
        calls[f"{axis.name} {name}"] += 1
        sizes[f"{axis.name} {name}"] += x.numel() * x.element_size()

    sizes_of = meshes.parse(text, world)
    mesh = meshes.make(sizes_of, note=note)
    on: Parallel = parallel.make(
        qwen3_vl.abstract(CFG), mesh, tables.TABLES[options.get("table", "fsdp")],
        sequence=options.get("sequence", False),
    )  # fmt: skip
    local = layout.local(param.init(qwen3_vl.abstract(CFG), 0, place=on.layout.place))
    compute = on.compute(Compute(), again=options.get("again", False))
    batch = tiny.batch(tiny.encoded("A", "all"))
    own = context.split(
        batch, mesh.cp.index, ring=mesh.ring.size, ulysses=mesh.ulysses.size, merge=2
    )
    loss = on.loss(lambda p, b: qwen3_vl.loss(p, b, CFG, compute))

    def keep(path: str, leaf: Any) -> bool:
        return not path.startswith(options.get("frozen", "nothing"))

    trained, frozen = tree.partition(keep, local)
    total = value_and_grad(lambda p, b: loss(tree.combine(p, frozen), b))
    _, grads = on.reduce(*total(trained, own))
    on.norm(tree.partition(keep, on.layout.specs)[0])(grads)
    return calls, sizes


def counted(text: str, world: int, **options: Any) -> tuple[Counter[str], Counter[str]]:
    """Count in a process of its own: groups of this kind replace the real ones."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_counted, (text, world, options))


def cut(dim: Callable[[Any], bool]) -> int:
    """Count the values of the weights that are cut over fsdp, or of those that are not."""
    abstract = qwen3_vl.abstract(CFG)
    where = layout.make(abstract, meshes.single(), tables.FSDP)
    return sum(
        leaf.size
        for leaf, spec in zip(tree.leaves(abstract), tree.leaves(where.specs), strict=True)
        if dim(spec.dim("fsdp"))
    )


@pytest.mark.parametrize("world", [2, 16])
@pytest.mark.parametrize("again", [False, True])
def test_sharded_weights_are_gathered_once_or_twice_and_scattered_once(
    world: int, again: bool
) -> None:
    """A call a block whatever its weights; each rank gives its part, and takes all gradients."""
    calls, sizes = counted("", world, again=again)
    assert calls["fsdp all_gather"] == BLOCKS * (2 if again else 1) + SINGLE
    assert calls["fsdp reduce_scatter"] == BLOCKS + SINGLE
    # Norms and biases of heads: one sum for each block, and for each merger's bias.
    assert calls["fsdp all_reduce sum"] == BLOCKS + 1 + len(CFG.vision.deepstack)
    assert calls["all all_reduce sum"] == 2  # The loss, the norm.
    assert (
        sum(calls.values())
        == sum(calls[f"fsdp {name}"] for name in ("all_gather", "reduce_scatter", "all_reduce sum"))
        + 2
    )
    values = cut(lambda dim: dim is not None)
    assert sizes["fsdp reduce_scatter"] == 4 * values
    assert sizes["fsdp all_reduce sum"] == 4 * cut(lambda dim: dim is None)
    if not again:
        assert sizes["fsdp all_gather"] == 4 * values // world


def test_frozen_weights_are_gathered_and_send_no_gradient() -> None:
    """A frozen tower: gathers as before, scatters and sums of the decoder only."""
    calls, _ = counted("", 4, frozen="vision.")
    assert calls["fsdp all_gather"] == BLOCKS + SINGLE
    assert calls["fsdp reduce_scatter"] == CFG.layers + 3
    assert calls["fsdp all_reduce sum"] == CFG.layers


def test_the_number_of_calls_does_not_grow_with_the_ranks() -> None:
    """Up to 512 ranks, of which 16 cut the weights and 32 hold copies: one sum more a step."""
    few, _ = counted("", 16)
    many, sizes = counted("dp=32 fsdp=16", 512)
    assert many.pop("dp all_reduce sum") == 1
    assert many == few
    assert sizes["dp all_reduce sum"] == 4 * (
        cut(lambda dim: dim is not None) // 16 + cut(lambda dim: dim is None)
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_heads_cut_over_ranks_move_activations_four_times_a_block(sequence: bool) -> None:
    """In and out of attention and the feed-forward layer, each way; weights stay where they are."""
    calls, _ = counted("tp=2 dp=", 512, table="fsdp_tp_text", sequence=sequence)
    text = CFG.layers
    # Two pairs a block, one for the embedding and the head together.
    forward = backward = 2 * text + 1
    assert calls["tp all_reduce max"] == 1
    if sequence:
        assert calls["tp all_gather"] == calls["tp reduce_scatter"] == forward + backward
        # Norms of heads and of tokens in each block, the last norm, features; two of the loss.
        assert calls["tp all_reduce sum"] == 2 * text + 2 + 2
    else:
        assert calls["tp all_reduce sum"] == forward + backward + text + 2


def test_heads_are_exchanged_four_times_a_block_each_way() -> None:
    """Ulysses: queries, keys and values out, the result back; features join once."""
    calls, _ = counted("cp=2 fsdp=", 512)
    assert calls["ulysses all_to_all"] == 2 * 4 * CFG.layers
    assert (calls["cp all_gather"], calls["cp reduce_scatter"]) == (1, 1)


def test_keys_go_round_a_ring_once_each_way() -> None:
    """A ring of four: three passes forward of keys and values together; backward three again, as
    scores are not kept, and four of their gradients."""
    calls, _ = counted("cp=4 ulysses=1 fsdp=", 512)
    assert calls["ring ppermute"] == (3 + 3 + 4) * CFG.layers
