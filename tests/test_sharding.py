"""Meshes, rules, layouts, collectives and cuts of rows, each by itself."""

import os
import signal
from functools import partial
from typing import Any

import attrs
import pytest
import tiny
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from mmfn import param, tree
from mmfn.batch import Batch
from mmfn.data import pack
from mmfn.models import qwen3_vl
from mmfn.param import Param
from mmfn.sharding import axes, context, layout, parallel, rules, simulate
from mmfn.sharding import mesh as meshes
from mmfn.sharding.check import checker
from mmfn.sharding.layout import Layout
from mmfn.sharding.mesh import Sizes
from mmfn.sharding.rules import Spec

# --- meshes


@pytest.mark.parametrize(
    ("text", "world", "sizes"),
    [
        ("", 8, Sizes(fsdp=8)),
        ("fsdp=4 tp=2", 8, Sizes(fsdp=4, tp=2)),
        ("fsdp= tp=2", 8, Sizes(fsdp=4, tp=2)),
        ("dp=2,cp=4", 8, Sizes(dp=2, cp=4, ulysses=4)),
        ("cp= ulysses=2", 8, Sizes(cp=8, ulysses=2)),
        ("cp=4 ulysses=1 dp=", 4, Sizes(cp=4)),
        ("fsdp=1", 1, Sizes()),
    ],
)
def test_a_mesh_is_read_from_text_and_written_back(text: str, world: int, sizes: Sizes) -> None:
    """One size may be left open; ulysses is all of cp unless it is given."""
    assert meshes.parse(text, world) == sizes
    assert meshes.parse(str(sizes), world) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=3", r"mesh 'fsdp=3' has 3 ranks; there are 8"),
        ("fsdp=3 tp=", r"3 does not divide the 8 ranks"),
        ("fsdp= tp=", r"leaves fsdp and tp open; one can be"),
        ("fdsp=8", r"'fdsp=8' is none of dp, fsdp, cp, tp, ulysses, ep with =SIZE"),
        ("fsdp", r"'fsdp' is none of"),
        ("fsdp=8 fsdp=1", r"names fsdp twice"),
        ("fsdp=eight", r"the size of fsdp is 'eight', not a whole number"),
        ("fsdp=8 tp=0", r"tp=0 is below 1"),
        ("cp=8 ulysses=3", r"cp=8 is not a multiple of ulysses=3"),
        ("fsdp=8 ep=3", r"fsdp=8 · cp=1 is not a multiple of ep=3"),
        ("tp= ep=2", r"fsdp=1 · cp=1 is not a multiple of ep=2"),
        ("fsdp= ep=", r"gives ep no size; it adds no ranks to fill"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_by_name(text: str, message: str) -> None:
    """With the numbers of both sides."""
    with pytest.raises(ValueError, match=message):
        meshes.parse(text, 8)


def test_a_mesh_without_ranks_is_this_process() -> None:
    """Its axes have one rank each, and two ranks are refused."""
    mesh = meshes.make(Sizes())
    assert (mesh.tp.size, mesh.shard.size, mesh.data_index) == (1, 1, 0)
    with pytest.raises(ValueError, match="has 2 ranks; there are 1"):
        meshes.make(Sizes(tp=2))


def ranks_read(rank: int, text: str) -> tuple[int, int, int, int]:
    """Say what a rank of a mesh of eight is."""
    mesh = meshes.make(meshes.parse(text, 8))
    return mesh.data_index, mesh.cp.index, mesh.tp.index, mesh.shard.index


def test_ranks_of_cp_and_tp_read_the_same_samples() -> None:
    """tp changes fastest, then cp; data ranks are disjoint and complete."""
    found = simulate.run(8, ranks_read, "dp=2 cp=2 tp=2")
    assert [data for data, *_ in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [cp for _, cp, _, _ in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [tp for _, _, tp, _ in found] == [0, 1] * 4


# --- rules and layouts


def test_a_table_is_extended_by_words() -> None:
    """A name first, then changes; an empty target takes a rule away."""
    found = rules.parse(("fsdp_tp", "vocab=", "head_dim=fsdp"))
    assert "vocab" not in found
    assert found["head_dim"] == "fsdp"
    assert found["mlp"] == "tp"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing",), "'nothing' is not AXIS=MESH_AXIS or one of"),
        (("fsdp", "embd=fsdp"), "no axis is called 'embd'; there are vocab, embed"),
        (("fsdp", "embd="), "no axis is called 'embd'"),
        (("mlp=pt",), "axis 'mlp' goes to mesh axis 'pt'; weights are cut over fsdp and tp"),
    ],
)
def test_a_table_that_names_nothing_is_refused(words: tuple[str, ...], message: str) -> None:
    """Misspelt, it would silently mean whole."""
    with pytest.raises(ValueError, match=message):
        rules.parse(words)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({**rules.FSDP, "mlp": "fsdp"}, "axes 'mlp' and 'embed' both go to mesh axis 'fsdp'"),
        ({**rules.FSDP_TP, "embed": "tp"}, "axis 'embed' goes to tp; kv_heads, mlp, vocab"),
        ({"kv_heads": "tp", "mlp": "tp"}, "of the decoder go to tp, but not vocab"),
        ({**rules.FSDP_TP_TEXT, "vision_mlp": "tp"}, "but not merged_mlp, vision_heads"),
        ({**rules.FSDP, "vision_mlp": ("ep", "tp")}, "axis 'vision_mlp' goes to ep; expert can"),
    ],
)
def test_a_table_that_cannot_be_computed_with_is_refused(table: Any, message: str) -> None:
    """Two mesh axes on one weight's axes, or half of a block."""
    with pytest.raises(ValueError, match=message):
        parallel.make(qwen3_vl.abstract(tiny.CONFIG), meshes.single(), table)


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    """Initial values of each rank are the slices of those of one device; none holds more."""
    abstract = qwen3_vl.abstract(tiny.CONFIG)
    whole = param.init(abstract, 7)

    def parts(rank: int, text: str, table: str) -> tuple[bool, int]:
        mesh = meshes.make(meshes.parse(text, 6))
        where = layout.make(abstract, mesh, rules.parse((table,)))
        made = param.init(abstract, 7, place=where.place)
        same = all(
            torch.equal(x.full_tensor(), y)
            for x, y in zip(tree.leaves(made), tree.leaves(whole), strict=True)
        )
        return same, sum(x.to_local().numel() for x in tree.leaves(made))

    total = param.count(abstract)
    for text, table in [("fsdp=6", "fsdp"), ("fsdp=3 tp=2", "fsdp_tp"), ("dp=2 fsdp=3", "fsdp")]:
        found = simulate.run(6, parts, text, table)
        assert all(same for same, _ in found)
        copies = 2 if "dp" in text else 1
        assert max(held for _, held in found) < 1.25 * copies * total / 6


def test_the_norm_counts_each_value_once() -> None:
    """A whole gradient of norm 2 and cut ones of 3 and 6: 7 on both, not 3.6 and 6.3 or 7.3."""

    def norm(rank: int) -> float:
        mesh = meshes.make(Sizes(fsdp=2))
        specs = {"whole": Spec((4,)), "cut": Spec((2,), (("fsdp", 0),))}
        values = {"whole": torch.full((4,), 1.0), "cut": torch.tensor([3.0 + 3.0 * rank])}
        return float(Layout(mesh, specs).norm(values, specs))

    assert simulate.run(2, norm) == [7.0, 7.0]


# --- collectives


def transposed(rank: int) -> list[tuple[str, float, float]]:
    """Give, for each pair, <A x, y> and <x, A' y> summed over ranks, where A' is its gradient."""
    axis = meshes.make(Sizes(tp=4)).tp
    random = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    calls = {
        "all_gather": (lambda x: axes.all_gather(x, axis, 1, 8), draw(3, 2)),
        "all_gather uneven": (
            lambda x: axes.all_gather(x, axis, 0, 6),
            draw(*(len(range(*axis.part(6).indices(6))), 3)),
        ),
        "reduce_scatter": (lambda x: axes.reduce_scatter(x, axis, 0), draw(8, 3)),
        "reduce_scatter uneven": (lambda x: axes.reduce_scatter(x, axis, 1), draw(2, 5)),
        "all_to_all": (lambda x: axes.all_to_all(x, axis, split=1, join=0), draw(2, 8)),
        "ppermute": (lambda x: axes.ppermute(x, axis, 3), draw(2, 2)),
    }
    found = []
    for name, (call, x) in calls.items():
        x.requires_grad_()
        out = call(x)
        # The same on all ranks where the result is.
        y = torch.randn(out.shape, generator=random, dtype=torch.float64)
        (back,) = torch.autograd.grad(out, x, y)
        sums = torch.stack(((out * y).sum(), (x * back).sum())).detach()
        left, right = axes.reduce(sums, axis).tolist()
        found.append((name, left, right))
    return found


def test_collectives_are_transposes_of_each_other() -> None:
    """<A x, y> = <x, A' y> over all ranks, even and uneven."""
    for each in simulate.run(4, transposed):
        for name, left, right in each:
            assert left == pytest.approx(right, rel=1e-12), name


def test_sums_and_varying_values_are_transposes() -> None:
    """`psum` passes the gradient as it is, `vary` sums it; both at once for many values."""

    def grads(rank: int) -> tuple[float, list[float]]:
        axis = meshes.make(Sizes(tp=2)).tp
        x = torch.tensor(float(rank + 1), requires_grad=True)
        (own,) = torch.autograd.grad(axes.psum(x, axis) * 5.0, x)
        a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        left, right = axes.vary(axis, a, b)
        loss = left.sum() * (rank + 1.0) + right.sum() * 10.0
        return own.item(), [g.unique().item() for g in torch.autograd.grad(loss, (a, b))]

    assert simulate.run(2, grads) == [(5.0, [3.0, 20.0])] * 2


def test_forward_mode_through_ranks_is_an_error() -> None:
    """Torch's own collectives would give a tangent of zero without a word."""

    def push(rank: int) -> str:
        axis = meshes.make(Sizes(tp=2)).tp
        with pytest.raises(Exception, match=r"jvp|forward|vmap") as caught:
            torch.func.jvp(lambda x: axes.psum(x, axis), (torch.ones(2),), (torch.ones(2),))
        return type(caught.value).__name__

    simulate.run(2, push)


def test_a_wrong_order_of_calls_is_named() -> None:
    """Axis, ranks and both calls, instead of a hang; and a rank that makes no call."""

    def wrong(rank: int) -> str:
        store = distributed_c10d._get_default_store()
        axis = meshes.make(Sizes(tp=2), note=checker(store, seconds=3)).tp
        x = torch.ones(2)
        call = partial(axes.psum, axis=axis) if rank == 0 else gather_four(axis)
        with pytest.raises(RuntimeError) as caught:
            call(x)
        return str(caught.value)

    for rank, message in enumerate(simulate.run(2, wrong)):
        assert f"axis tp, call 1: rank {rank} makes" in message
        assert "all_reduce sum of (2,) float32" in message
        assert "all_gather of (2,) float32" in message
        assert "test_sharding.py:" in message


def gather_four(axis: axes.Axis) -> Any:
    """Make a call that the other rank does not make."""
    return lambda x: axes.all_gather(x, axis, 0, 4)


# --- rows cut over ranks


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 4), (4, 1), (2, 2), (3, 2)])
def test_every_token_is_held_once_and_causal_work_is_even(ring: int, ulysses: int) -> None:
    """Pairs of query and earlier key are equally many on each place of the ring."""
    held = context.order(48, ring, ulysses)
    assert held.flatten().sort().values.tolist() == list(range(48))
    pairs = held.view(ring, -1).sum(1)
    assert ring == 1 or pairs.unique().numel() == 1


def test_a_cut_row_keeps_tokens_targets_and_features_together() -> None:
    """Each rank's positions, targets and features are those of its tokens."""
    samples = [tiny.encoded(name, "all") for name in "ATB"]
    made, _ = pack.collate([samples], geometry=tiny.GEOMETRY, tokens=75)
    parts = [context.split(made, i, ring=2, ulysses=2, merge=2) for i in range(4)]
    whole = context.padded(made, 8)
    assert len(whole.tokens) == 80
    held = context.order(80, 2, 2)
    features = len(parts[0].media.patches) // 4
    seen = []
    for own, part in zip(held, parts, strict=True):
        assert torch.equal(part.tokens, whole.tokens[own])
        assert torch.equal(part.positions, whole.positions[:, own])
        assert torch.equal(part.feature >= 0, whole.feature[own] >= 0)
        real = part.weights > 0
        seen += own[part.at[real]].tolist()
        assert torch.equal(part.targets[real], whole.tokens[own[part.at[real]] + 1])
        # The patches behind each feature are those of one device.
        for token, index in zip(own.tolist(), part.feature.tolist(), strict=True):
            if index >= 0:
                owner, place = divmod(index, features)
                theirs = made.media.patches[4 * made.feature[token]]
                assert torch.equal(parts[owner].media.patches[4 * place], theirs)
    assert sorted(seen) == made.at[made.weights > 0].tolist()


def test_a_row_is_lengthened_in_its_tail_only() -> None:
    """Ends of segments stay, the last is the new length, also where there was no tail."""
    made, _ = pack.collate([[tiny.encoded("T", "all")]], geometry=tiny.GEOMETRY, tokens=7)
    longer: Batch = context.padded(made, 8)
    assert longer.segments.ends.tolist() == [7] + [8] * 15
    assert longer.segments.number.tolist() == [1] * 7 + [0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_frames_are_dealt_evenly(ranks: int) -> None:
    """Each once, in order within a rank, within 4/3 of the mean or the largest."""
    costs = [float(1 + i * i % 37) for i in range(40)]
    dealt = context.deal(costs, ranks)
    assert sorted(i for items in dealt for i in items) == list(range(40))
    most = max(sum(costs[i] for i in items) for items in dealt)
    assert most <= 4 / 3 * max(sum(costs) / ranks, max(costs))


def test_a_weight_without_a_rule_is_whole() -> None:
    """And one with a tuple of targets goes to the first that there is."""
    leaf = Param((4, 6), "expert embed", "w")
    assert rules.spec(leaf, {}).cuts == ()
    assert rules.spec(leaf, {"embed": ("ep", "fsdp")}).cuts == (("fsdp", 1),)
    assert attrs.asdict(rules.spec(leaf, rules.FSDP))["shape"] == (4, 6)


def test_a_simulated_rank_that_dies_is_named_before_what_others_lose() -> None:
    """By its signal; one that raises by its own traceback."""

    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))

    with pytest.raises(simulate.Died, match="rank 1 was ended by signal 9"):
        simulate.run(2, die)

    def fail(rank: int) -> None:
        if rank == 0:
            raise ValueError("of its own")
        torch.distributed.all_reduce(torch.ones(1))

    with pytest.raises(RuntimeError, match=r"(?s)rank 0 failed:.*ValueError: of its own"):
        simulate.run(2, fail)
