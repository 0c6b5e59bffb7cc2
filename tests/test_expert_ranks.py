"""Known faults of others with experts on several ranks, and the laws of expert parallelism."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import tiny
import torch
from meshes import local, loss_and_norm, on_mesh, own_batch
from test_ranks import Run, expect, rows, steps

from mmfn import tree
from mmfn.compute import Compute, sequential
from mmfn.kernels import cpu
from mmfn.models import moe, qwen3_vl
from mmfn.sharding import layout, simulate
from mmfn.transforms import keep_choices, remat, value_and_grad

CFG = tiny.MOE
WAYS = ("exchanged", "in two parts", "balanced", "gathered", "bounded")


def experts(params: qwen3_vl.Qwen3VL) -> Any:
    """Pick the weights of all experts."""
    return [[layer.mlp.gate_up, layer.mlp.down] for layer in params.text.layers]


def routers(params: qwen3_vl.Qwen3VL) -> Any:
    """Pick the routers."""
    return [layer.mlp.router for layer in params.text.layers]


def test_gradients_of_experts_are_those_of_one_device() -> None:
    """Not ep times too large, whatever way tokens go: A alone, of the ranks that have nothing too;
    norms 6.913276 in all, 2.012487 of experts, 0.158448 of routers."""
    alone = (4.976150, 6.913276)

    def case(mesh: str, pick: Any, **options: Any) -> Run:
        return (mesh, CFG, "A|" if "cp" not in mesh else "A", "all", {"pick": pick, **options})

    expect(
        2,
        [(case("fsdp=2 ep=2", experts, experts=way), (*alone, 2.012487)) for way in WAYS]
        + [
            (case("fsdp=2 ep=2", routers), (*alone, 0.158448)),
            (case("fsdp=2", experts), (*alone, 2.012487)),
            (case("cp=2 ep=2", experts), (*alone, 2.012487)),
        ],
    )


def test_four_ranks_of_experts() -> None:
    """One expert a rank; copies of them; cut channels; A and T against one device."""
    both = loss_and_norm("", 1, CFG, rows("AT", "all"), pick=experts)
    tp = {"table": "fsdp_tp", "sequence": True, "pick": experts}
    cases = [
        ("fsdp=4 ep=4", "A|T||", {"pick": experts}),
        ("dp=2 fsdp=2 ep=2", "A||T|", {"pick": experts}),
        ("fsdp=2 cp=2 ep=4", "A|T", {"pick": experts}),
        ("fsdp=2 tp=2 ep=2", "A|T", tp),
        ("fsdp=2 tp=2 ep=2", "A|T", {**tp, "experts": "gathered"}),
    ]
    expect(4, [((mesh, CFG, text, "all", options), both) for mesh, text, options in cases])


def test_the_first_steps_of_training_with_experts(tmp_path: Path) -> None:
    """The fingerprint of A, T, C, B: one norm of gradients on all ranks (4.69549 at first), and a
    checkpoint of four ranks goes on on others."""
    first = simulate.run(4, steps, 4, "fsdp=4 ep=2", "fsdp", tmp_path, 0, 3, CFG)
    assert first[0] == pytest.approx([4.910857, 4.770734, 4.600769], abs=1e-5)
    assert all(each == first[0] for each in first)
    later = []
    for world, text in [(1, ""), (2, "fsdp=2 ep=2"), (4, "fsdp=4 ep=4"), (3, "fsdp=3")]:
        for folder in (tmp_path / "checkpoints").iterdir():
            if folder.name != "step-00000003":
                folder.rename(tmp_path / f"done-{len(later)}")
        later += simulate.run(world, steps, world, text, "fsdp", tmp_path, 3, 4, CFG)
    assert all(each == pytest.approx(later[0], abs=2e-5) for each in later)


def idle(rank: int) -> list[tuple[float, float, bool]]:
    """Let all tokens choose experts 0 and 1: how far gradients are from one device, and whether
    those of experts that got none are zeros here."""
    weights = tree.map_with_path(
        lambda path, leaf: (
            torch.zeros_like(leaf).index_fill(0, torch.tensor([0, 1]), 50.0)
            if path.endswith("router")
            else leaf
        ),
        tiny.params(CFG, torch.float64),
    )
    # All states have a positive sum, so that both rows win for every token.
    weights = tree.map_with_path(
        lambda path, leaf: leaf.abs() if path.endswith("embedding") else leaf, weights
    )
    found = []
    for way in WAYS:
        on = on_mesh("fsdp=2 ep=2", 2, CFG, experts=way)
        compute = on.compute(Compute())
        total = value_and_grad(
            on.loss(lambda p, b, c=compute: qwen3_vl.losses_of(p, b, CFG, c)), more=True
        )
        batch = own_batch(on, rows("T|C", "all", alike=True))
        (value, routed), grads = on.reduce(*total(local(on, weights), batch))
        assert routed.load[0, 2:].tolist() == [0, 0]
        gate = grads.text.layers[0].mlp.gate_up
        found.append((value.item(), gate.abs().sum().item(), routed.load[0, :2].tolist()))
    return found


def test_a_rank_whose_experts_get_no_token_takes_part() -> None:
    """It ends, with gradients of exactly zero there."""
    both = simulate.run(2, idle, seconds=60.0)
    for way, one, two in zip(WAYS, *both, strict=True):
        assert one[0] == pytest.approx(both[0][0][0], abs=1e-9), way
        assert one[1] > 0, way
        assert two[1] == 0, way


def refused(rank: int, text: str, cfg: qwen3_vl.Config) -> str:
    """Say why a mesh is refused."""
    with pytest.raises(ValueError, match="ep") as caught:
        on_mesh(text, 4, cfg)
    return str(caught.value)


def test_experts_that_do_not_divide_are_refused_before_anything_is_loaded() -> None:
    """Six over four ranks; none at all; more ep than ranks of data."""
    six = attrs.evolve(CFG, experts=moe.Config(6, 2, 24))
    for text, cfg, message in (
        ("fsdp=4 ep=4", six, "num_experts=6 is not a multiple of ep=4"),
        ("fsdp=4 ep=4", tiny.CONFIG, "the mesh has ep=4, but the model has no experts"),
        ("fsdp=4 ep=3", CFG, "fsdp=4 · cp=1 is not a multiple of ep=3"),
        ("fsdp=2 tp=2 ep=4", CFG, "fsdp=2 · cp=1 is not a multiple of ep=4"),
    ):
        for said in simulate.run(4, refused, text, cfg):
            assert message in said


def test_uneven_parts_of_experts_equal_one_device() -> None:
    """Four experts on ep=2, their width of 32 over three ranks."""
    whole = loss_and_norm("", 1, CFG, rows("ATB", "all"), pick=experts)
    expect(6, [(("fsdp=6 ep=2", CFG, "A|T|B|||", "all", {"pick": experts}), whole)])


def recomputed(rank: int) -> list[bool]:
    """Whether gradients with and without recompute are the same bit for bit, on two ranks."""
    weights = tree.map_with_path(
        lambda path, leaf: leaf[[0, 0, 2, 3]] if path.endswith("router") else leaf,
        tiny.params(CFG),
    )
    same = []
    for way in WAYS:
        on = on_mesh("fsdp=2 ep=2", 2, CFG, experts=way)
        found = []
        for stack in (sequential, remat(sequential, keep_choices)):
            compute = on.compute(Compute(ops=cpu.OPS, stack=stack))
            total = value_and_grad(on.loss(lambda p, b, c=compute: qwen3_vl.loss(p, b, CFG, c)))
            found.append(total(local(on, weights), own_batch(on, rows("AT|CB", "all", alike=True))))
        same.append(all(map(torch.equal, tree.leaves(found[0][1]), tree.leaves(found[1][1]))))
    return same


def test_recompute_on_ranks_routes_as_the_first_pass_did() -> None:
    """With ties between experts of one rank, whatever way tokens go."""
    assert simulate.run(2, recomputed) == [[True] * len(WAYS)] * 2


def spilt(rank: int) -> tuple[float, float]:
    """Count what is left out where there is half the room that an even routing needs."""
    on = on_mesh("fsdp=2 ep=2", 2, CFG, experts="half")
    compute = on.compute(Compute())
    batch = own_batch(on, rows("A|T", "all", alike=True))
    _, routed = qwen3_vl.losses_of(on.layout.bind(local(on, tiny.params(CFG))), batch, CFG, compute)
    assert routed is not None
    total = on.total(routed)
    return total.left_out.sum().item(), total.load.sum().item()


def test_what_finds_no_room_is_counted_on_every_rank() -> None:
    """Of 2 choices x 3 blocks x 40 tokens, rows of 33 and 7, half or more of the larger rank's."""
    (lost, load), other = simulate.run(2, spilt)
    assert (lost, load) == other
    assert load == 240
    assert 0 < lost < 240


def stored(rank: int) -> dict[str, tuple[int, ...]]:
    """Give shapes of what this rank holds of a block."""
    on = on_mesh("fsdp=4 ep=2", 4, CFG)
    params = tree.map(
        lambda value, own: layout.wrap(value, own, on.mesh),
        local(on, tiny.params(CFG)),
        on.layout.specs,
    )
    whole = tree.map(layout.full, params)
    assert all(map(torch.equal, tree.leaves(whole), tree.leaves(tiny.params(CFG))))
    return {path: tuple(leaf.to_local().shape) for path, leaf in tree.items(params.text.layers[0])}


def test_experts_are_stored_in_parts() -> None:
    """Two of four experts, half of their width; the router's width is cut as others are."""
    found = simulate.run(4, stored)
    assert all(each == found[0] for each in found)
    assert found[0]["mlp.gate_up"] == (2, 16, 2, 24)
    assert found[0]["mlp.down"] == (2, 24, 16)
    assert found[0]["mlp.router"] == (4, 8)
