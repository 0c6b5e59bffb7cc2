"""Known faults of others on several ranks: targets, borders, ties, uneven sizes, mixed ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import tiny
import torch
from meshes import local, loss_and_norm, on_mesh, own_batch

from mmfn import checkpoint, optim, schedules, tree
from mmfn.batch import Batch
from mmfn.compute import Compute
from mmfn.data import pack
from mmfn.kernels import cpu
from mmfn.models import qwen3_vl
from mmfn.sharding import layout, simulate
from mmfn.sharding.layout import on_local
from mmfn.train import TrainState, make_step, start

TIED = attrs.evolve(tiny.CONFIG, tied=True)
ODD = attrs.evolve(TIED, vocab=130)

LABELS = {("C", "all"): "C", ("C", "text"): "all"}
"""C has nine targets by its own rule where others have all; `text` is all of C too."""

Run = tuple[str, qwen3_vl.Config, str, str, dict[str, Any]]
"""Mesh, config, samples of each data rank, which are supervised, options."""


def rows(text: str, labels: str, *, alike: bool = False) -> list[Batch]:
    """Pack the samples of each data rank (`AB|T`), and count the targets of all.

    Rows are as long as their samples, or all `alike` as the longest.
    """
    lengths = [sum(len(tiny.SEQUENCES[n]) for n in names) or 1 for names in text.split("|")]
    made = [
        pack.collate(
            [[tiny.encoded(n, LABELS.get((n, labels), labels)) for n in names]],
            geometry=tiny.GEOMETRY,
            tokens=max(lengths) if alike else length,
        )
        for names, length in zip(text.split("|"), lengths, strict=True)
    ]
    count = pack.total([counts for _, counts in made]).divisor("token")
    return list(pack.with_count([batch for batch, _ in made], count))


def run(rank: int, world: int, runs: Sequence[Run]) -> list[tuple[float, float, float]]:
    """Compute each on this rank."""
    # Experts that are gathered or bounded need as many tokens on each rank.
    return [
        loss_and_norm(
            mesh, world, cfg, rows(text, labels, alike=cfg.experts is not None), **options
        )
        for mesh, cfg, text, labels, options in runs
    ]


def embedding(params: qwen3_vl.Qwen3VL) -> Any:
    """Pick the embedding."""
    return params.text.embedding


def key(params: qwen3_vl.Qwen3VL) -> Any:
    """Pick the keys of the first layer."""
    return params.text.layers[0].attention.k


def expect(world: int, cases: Sequence[tuple[Run, tuple[float | None, ...]]]) -> None:
    """Hold loss (1e-5), norm and norm of the picked leaf (1e-4) to what one device gives."""
    for rank, found in enumerate(simulate.run(world, run, world, [case for case, _ in cases])):
        for (case, wanted), got in zip(cases, found, strict=True):
            where = f"rank {rank}, {case[0]}, {case[2]}: {got}"
            assert got[0] == pytest.approx(wanted[0], abs=1e-5), where
            for value, want in zip(got[1:], wanted[1:], strict=False):
                if want is not None:
                    assert value == pytest.approx(want, rel=1e-4), where


def test_two_ranks_give_the_published_numbers() -> None:
    """Unequal targets, text beside pictures, borders of a cut row, odd lengths, ties."""
    a_t = (5.242253, 27.012285)
    expect(
        2,
        [
            # Ranks with 21 and 15 targets: the mean of their means would be 5.005062.
            (("fsdp=2", tiny.CONFIG, "AB|TC", "all", {}), (5.024938, 20.966279)),
            (("dp=2", tiny.CONFIG, "AB|TC", "all", {}), (5.024938, 20.966279)),
            # Text only beside a picture, and the other way round.
            (("fsdp=2", tiny.CONFIG, "A|T", "all", {}), a_t),
            (("fsdp=2", tiny.CONFIG, "T|A", "all", {}), a_t),
            (("dp=2", tiny.CONFIG, "T|A", "all", {}), a_t),
            # A rank that has nothing at all: fewer samples than ranks.
            (("fsdp=2", tiny.CONFIG, "A|", "all", {}), (5.183817, 22.330985)),
            # No target is lost at a border, whatever the length.
            (("cp=2", tiny.CONFIG, "C", "all", {}), (4.570230, 27.266976)),
            (("cp=2", tiny.CONFIG, "C", "text", {}), (4.589299,)),
            (("cp=2 ulysses=1", tiny.CONFIG, "C", "text", {}), (4.589299,)),
            (("cp=2", tiny.CONFIG, "A", "all", {}), (5.183817, 22.330985)),
            (("cp=2 ulysses=1", tiny.CONFIG, "A", "all", {}), (5.183817, 22.330985)),
            (("cp=2", tiny.CONFIG, "T", "all", {}), (5.359126, 60.300610)),
            (("cp=2", tiny.CONFIG, "ATB", "last4", {}), (5.308712,)),
            (("cp=2 ulysses=1", tiny.CONFIG, "ATB", "last4", {}), (5.308712,)),
            # One embedding at both ends, cut over data ranks or over the vocabulary.
            (
                ("fsdp=2", TIED, "A|", "last4", {"pick": embedding}),
                (5.417253, None, 3.119639),
            ),
            (
                ("tp=2", TIED, "A", "all", {"table": "fsdp_tp", "pick": embedding}),
                (5.300910, 20.388954, 1.713919),
            ),
        ],
    )


def test_four_ranks_give_the_published_numbers() -> None:
    """More ranks than key heads, a vocabulary that they do not divide, and rows cut in four."""
    whole = loss_and_norm("", 1, ODD, rows("A", "all"))
    shared = attrs.evolve(tiny.CONFIG, kv_heads=1)
    keys = loss_and_norm("", 1, shared, rows("A", "all"), pick=key)
    tp = {"table": "fsdp_tp_text", "sequence": True}
    expect(
        4,
        [
            (("cp=4", tiny.CONFIG, "A", "all", {}), (5.183817, 22.330985)),
            (("cp=4 ulysses=1", tiny.CONFIG, "A", "all", {}), (5.183817, 22.330985)),
            (("cp=4 ulysses=2", tiny.CONFIG, "C", "all", {}), (4.570230, 27.266976)),
            (("cp=4", tiny.CONFIG, "ATB", "last4", {}), (5.308712,)),
            (
                ("tp=4", attrs.evolve(ODD, kv_heads=1), "A", "all", {**tp}),
                (loss_and_norm("", 1, attrs.evolve(ODD, kv_heads=1), rows("A", "all"))[:2]),
            ),
            (("tp=4", shared, "A", "all", {**tp, "pick": key}), keys),
            (("tp=2 fsdp=2", ODD, "A|", "all", {"table": "fsdp_tp"}), whole[:2]),
        ],
    )


def test_more_ranks_than_heads_are_refused_before_anything_is_loaded() -> None:
    """Two key heads and two groups cannot be cut in four, four query heads not in three."""

    def refused(rank: int, world: int) -> str:
        with pytest.raises(ValueError, match=r"tp=\d divides neither") as caught:
            on_mesh("tp=", world, tiny.CONFIG, "fsdp_tp_text")
        return str(caught.value)

    for world in (3, 4):
        message = f"tp={world} divides neither kv_heads=2 nor the groups=2 of query heads"
        assert simulate.run(world, refused, world) == [message] * world


def steps(
    rank: int,
    world: int,
    text: str,
    table: str,
    folder: Path,
    begin: int,
    end: int,
    cfg: qwen3_vl.Config = tiny.CONFIG,
) -> list[float]:
    """Train from step `begin` (read from the folder) to `end`, and save there."""
    on = on_mesh(text, world, cfg, table)
    compute = on.compute(Compute(ops=cpu.OPS))
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedules.constant(1e-3), betas=(0.9, 0.999), kernel=cpu.adamw_),
    )
    step = on_local(
        make_step(
            on.loss(lambda p, b: qwen3_vl.loss(p, b, cfg, compute)),
            optimizer,
            norm=on.norm(on.layout.specs),
            reduce=on.reduce,
        )
    )
    wrap = tree.map(
        lambda x, own: layout.wrap(x, own, on.mesh), local(on, tiny.params(cfg)), on.layout.specs
    )
    state = start(wrap, optimizer)
    group = torch.distributed.group.WORLD if on.mesh.stored is not None else None
    if begin:
        state, meta = checkpoint.restore(folder, begin, state, donate=True, group=group)
        assert meta == {"at": begin}
    # The four samples whatever the number of data ranks.
    names = ["ATCB", "AT|CB", "ATC|B|", "A|T|C|B", "", "A|T|C|B||"][on.mesh.sizes.data - 1]
    batch = own_batch(on, rows(names, "all"))
    losses = []
    for _ in range(begin, end):
        state, metrics = step(state, (batch,))
        losses.append(metrics["loss"].item())
    assert isinstance(state, TrainState)
    checkpoint.save(folder, end, state, {"at": end}, keep=9, group=group)
    return losses


def test_a_checkpoint_of_one_mesh_goes_on_on_any_other(tmp_path: Path) -> None:
    """Four ranks write; one, three, six and two by two read: the same loss at each later step.

    The first steps are those of the training fingerprint.
    """
    first = simulate.run(4, steps, 4, "fsdp=4", "fsdp", tmp_path, 0, 3)
    assert first[0] == pytest.approx([5.024939, 4.78321, 4.638898], abs=1e-5)
    assert all(each == first[0] for each in first)
    whole = tmp_path / "checkpoints" / "step-00000003"
    later = []
    for world, text, table in [
        (1, "", "fsdp"),
        (3, "fsdp=3", "fsdp"),
        (6, "dp=2 fsdp=3", "fsdp"),
        (4, "fsdp=2 tp=2", "fsdp_tp"),
        (4, "cp=4 ulysses=2", "fsdp"),
    ]:
        for folder in (tmp_path / "checkpoints").iterdir():
            assert folder.name in ("step-00000003", "step-00000005")
            if folder != whole:
                folder.rename(tmp_path / f"done-{len(later)}")
        later += simulate.run(world, steps, world, text, table, tmp_path, 3, 5)
    for each in later:
        assert each[0] == pytest.approx(later[0][0], abs=1e-6)
        assert each[1] == pytest.approx(later[0][1], abs=2e-5)
