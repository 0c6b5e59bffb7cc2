"""Adapters: what is adapted, the same numbers as PEFT, files that PEFT reads, merging."""

import json
from pathlib import Path
from typing import Any

import attrs
import peft
import pytest
import tiny
import torch
from published import SHAPES, keep_float64, published_inputs, sample
from torch import Tensor

from mmfn import lora, lora_files, param, tree
from mmfn.compute import Compute, sequential
from mmfn.data import pack
from mmfn.kernels import cpu
from mmfn.lora import Adapted
from mmfn.models import qwen3_vl, vision
from mmfn.transforms import remat, value_and_grad
from mmfn.weights_export import export

TEXT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TIED = attrs.evolve(tiny.CONFIG, tied=True)
GROUPS = qwen3_vl.GROUPS


def adapted(cfg: qwen3_vl.Config, own: lora.Config) -> Any:
    """Describe the model with its adapters."""
    return lora.adapt(qwen3_vl.abstract(cfg), own, GROUPS)


def filled(cfg: qwen3_vl.Config, own: lora.Config, dtype: torch.dtype = torch.float32) -> Any:
    """Make the reference model with adapters that do something."""
    abstract = adapted(cfg, own)
    mine, _ = lora.split(abstract)
    generator = torch.Generator().manual_seed(0)

    def some(path: str, leaf: param.Param) -> Tensor:
        value = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        return (1 + 0.2 * value if "magnitude" in path else 0.2 * value).to(dtype)

    _, rest = lora.split(abstract)
    base = tree.unflatten(rest, tree.leaves(tiny.params(cfg, dtype)))
    return tree.combine(tree.map_with_path(some, mine), base)


def count(cfg: qwen3_vl.Config, own: lora.Config) -> tuple[int, int]:
    """Count the weights that are adapted, and the values that are trained."""
    tree_of = adapted(cfg, own)
    mine, _ = lora.split(tree_of)
    return len(list(tree.nodes(Adapted, tree_of))), param.count(mine)


def test_which_weights_are_adapted() -> None:
    """R01: groups and names mean what they say; a list of what was found is given."""
    four = lora.Config(rank=4)
    assert count(tiny.CONFIG, four) == (43, 12224)
    assert count(tiny.CONFIG, attrs.evolve(four, targets=TEXT)) == (21, 6720)
    assert count(tiny.CONFIG, attrs.evolve(four, targets=("text",))) == (21, 6720)
    assert count(tiny.CONFIG, attrs.evolve(four, targets=("tower", "mergers")))[0] == 22
    # The patch embedding is a `proj` too, but no linear map: not adapted by surprise.
    assert count(tiny.CONFIG, attrs.evolve(four, targets=("proj",)))[0] == 4
    assert count(tiny.CONFIG, attrs.evolve(four, targets=("text.layers.[01].*",)))[0] == 14
    assert lora.table(adapted(tiny.CONFIG, four), GROUPS).splitlines() == [
        "text: 21 weights, 6,720 values (down, gate, k, o, q, up, v)",
        "tower: 16 weights, 2,816 values (down, proj, qkv, up)",
        "mergers: 6 weights, 2,688 values (down, up)",
    ]


@pytest.mark.parametrize(
    ("cfg", "targets", "message"),
    [
        (tiny.CONFIG, ("qproj",), "target 'qproj' matches no weight.*q_proj"),
        (tiny.CONFIG, ("q_proj", "text.layers.9.*"), "'text.layers.9.\\*' matches no weight"),
        (tiny.CONFIG, ("embed_tokens",), "names text.embedding, which takes no adapter"),
        (TIED, ("head",), "target 'head' matches no weight"),
        (TIED, ("lm_head",), "target 'lm_head' matches no weight"),
        (tiny.CONFIG, (), "targets names nothing"),
    ],
)
def test_a_target_that_is_nothing_is_refused(
    cfg: qwen3_vl.Config, targets: tuple[str, ...], message: str
) -> None:
    """R01 (f), R06."""
    with pytest.raises(ValueError, match=message):
        adapted(cfg, lora.Config(targets=targets))


def test_experts_are_adapted() -> None:
    """R02: names of an expert's matrices mean the stacked ones."""
    assert count(tiny.MOE, lora.Config(rank=4, targets=TEXT)) == (18, 10368)
    assert count(tiny.MOE, lora.Config(rank=4)) == (40, 15872)


@pytest.mark.parametrize(
    "change",
    [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"dropout": 1.0},
     {"magnitude": True, "dropout": 0.1}],
)  # fmt: skip
def test_odd_numbers_are_refused(change: dict[str, Any]) -> None:
    """By the name of the field."""
    with pytest.raises(ValueError, match=next(iter(change))):
        lora.Config(**change)


def ours(params: Any, cfg: qwen3_vl.Config, compute: Compute, seed: int = 4) -> tuple[Any, ...]:
    """Give the logits and the gradients of adapters, and what PEFT is given."""
    one, images, videos = sample(SHAPES["mixed"], cfg, seed)
    batch, _ = pack.collate([[one]], geometry=tiny.GEOMETRY, tokens=256)
    batch = tree.evolve(batch, media=tree.evolve(batch.media, patches=batch.media.patches.double()))
    mine, base = lora.split(params)
    logits = qwen3_vl.forward(params, batch, cfg, compute)[: len(one.tokens)]
    _, grads = value_and_grad(
        lambda adapters: qwen3_vl.loss(tree.combine(adapters, base), batch, cfg, compute)
    )(mine)
    return logits, grads, one, published_inputs(one, images, videos)


@pytest.mark.parametrize("compute", [Compute(), Compute(ops=cpu.OPS)], ids=["definition", "fused"])
@pytest.mark.parametrize(
    ("cfg", "own"),
    [
        (tiny.CONFIG, lora.Config(rank=4, alpha=6.0)),
        (TIED, lora.Config(rank=3, alpha=6.0, root=True, targets=(*TEXT, "qkv"))),
        (tiny.CONFIG, lora.Config(rank=2, magnitude=True)),
        (tiny.CONFIG, lora.Config(rank=2, targets=("head", "q_proj"))),
        (tiny.MOE, lora.Config(rank=4)),
        (tiny.MOE, lora.Config(rank=4, targets=("down_proj",))),
    ],
    ids=["dense", "tied root", "magnitude", "head", "experts", "down of experts"],
)
def test_peft_reads_them_and_agrees(
    cfg: qwen3_vl.Config,
    own: lora.Config,
    compute: Compute,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits and every gradient in float64, through a folder that PEFT loads."""
    keep_float64(monkeypatch)
    params = filled(cfg, own, torch.float64)
    mine, _ = lora.split(params)
    lora_files.save(mine, adapted(cfg, own), own, tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(
        tiny.reference(cfg), tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False
    ).double()
    logits, grads, one, inputs = ours(params, cfg, compute)
    out = model(**inputs, use_cache=False)
    torch.testing.assert_close(logits, out.logits[0])
    labels = torch.where(torch.from_numpy(one.supervised), torch.from_numpy(one.tokens), -100)
    torch.nn.functional.cross_entropy(
        out.logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum"
    ).backward()
    theirs = {
        name.replace(".default", ""): value.grad
        for name, value in model.named_parameters()
        if "lora" in name
    }
    abstract, _ = lora.split(adapted(cfg, own))
    for (path, grad), leaf in zip(tree.items(grads), tree.leaves(abstract), strict=True):
        (piece,) = leaf.pieces("peft")
        key = leaf.key if leaf.key in theirs else leaf.key.removesuffix(".weight")
        torch.testing.assert_close(
            piece.view(grad).reshape(piece.published),
            theirs.pop(key),
            msg=lambda text, path=path: f"{path}: {text}",
        )
    assert not theirs


@pytest.mark.parametrize("cfg", [tiny.CONFIG, TIED, tiny.MOE], ids=["dense", "tied", "experts"])
def test_merged_weights_compute_the_same(cfg: qwen3_vl.Config, tmp_path: Path) -> None:
    """R06: and they are exported as those of the model below are."""
    own = lora.Config(rank=4, magnitude=cfg.experts is None)
    params = filled(cfg, own, torch.float64)
    merged = lora.merge(params)
    batch = tiny.batch(tiny.encoded("A"))
    expected = qwen3_vl.loss(params, batch, cfg)
    torch.testing.assert_close(qwen3_vl.loss(merged, batch, cfg), expected)
    assert abs(expected - qwen3_vl.loss(lora.without(params), batch, cfg)) > 0.01
    export(merged, qwen3_vl.abstract(cfg), tmp_path / "merged")


def test_a_saved_adapter_is_read_again_and_nothing_else(tmp_path: Path) -> None:
    """R04: keys that match nothing are an error with their numbers."""
    own = lora.Config(rank=4, targets=TEXT)
    abstract, params = adapted(tiny.CONFIG, own), filled(tiny.CONFIG, own)
    mine, base = lora.split(params)
    lora_files.save(mine, abstract, own, tmp_path / "a", base="somewhere")
    again = lora_files.load(abstract, own, tmp_path / "a")
    for a, b in zip(tree.leaves(again), tree.leaves(mine), strict=True):
        assert torch.equal(a, b)
    text = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(
        text.replace(b"model.language_model.layers", b"model.language_mode1.layers")
    )
    with pytest.raises(ValueError, match=r"42 missing .*42 unexpected"):
        lora_files.load(abstract, own, tmp_path / "a")
    with pytest.raises(ValueError, match="r is 4; the run has 8"):
        lora_files.load(
            adapted(tiny.CONFIG, lora.Config(targets=TEXT)), lora.Config(), tmp_path / "a"
        )
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere"
    (tmp_path / "a" / "adapter_config.json").write_text(
        json.dumps(config | {"rank_pattern": {"q_proj": 2}})
    )
    with pytest.raises(ValueError, match="rank_pattern"):
        lora_files.load(abstract, own, tmp_path / "a")
    whole = tree.combine(mine, base)
    with pytest.raises(ValueError, match=r"text\.embedding is trained and is no adapter"):
        lora_files.save(whole, abstract, own, tmp_path / "b")


@pytest.mark.parametrize("cfg", [tiny.CONFIG, tiny.MOE], ids=["dense", "experts"])
def test_every_adapter_has_a_gradient_under_recompute(cfg: qwen3_vl.Config) -> None:
    """R07: of the second matrices at once; of the first ones from the second step on."""
    own = lora.Config(rank=4)
    mine, rest = lora.split(adapted(cfg, own))
    base = tree.unflatten(rest, tree.leaves(tiny.params(cfg)))
    batch = tiny.batch(tiny.encoded("A"))

    def loss(adapters: Any, compute: Compute) -> Tensor:
        return qwen3_vl.loss(tree.combine(adapters, base), batch, cfg, compute)

    adapters = param.init(mine, 0)
    plain, grads = value_and_grad(loss)(adapters, Compute(ops=cpu.OPS))
    again, same = value_and_grad(loss)(adapters, Compute(ops=cpu.OPS, stack=remat(sequential)))
    assert plain == again == qwen3_vl.loss(tiny.params(cfg), batch, cfg, Compute(ops=cpu.OPS))
    for (path, grad), other in zip(tree.items(grads), tree.leaves(same), strict=True):
        assert torch.equal(grad, other)
        assert bool(grad.any()) == path.endswith(".up"), path


def test_a_frozen_tower_keeps_nothing() -> None:
    """X03: no tensor of the tower is saved for the backward pass, unless it is adapted."""
    batch = tiny.batch(tiny.encoded("A"))

    def saved(own: lora.Config) -> int:
        params = filled(tiny.CONFIG, own)
        mine, base = lora.split(params)
        trained = tree.map(lambda leaf: leaf.requires_grad_(), mine)
        found = 0

        def note(x: Tensor) -> Tensor:
            nonlocal found
            found += 1
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            features = vision.encode(
                tree.combine(trained, base).vision, batch.media, tiny.CONFIG.vision, Compute()
            )
        assert any(x.requires_grad for x in features) == bool(found)
        return found

    assert saved(lora.Config(targets=TEXT)) == 0
    mergers = saved(lora.Config(targets=("mergers",)))
    assert 0 < mergers < saved(lora.Config(targets=("tower",)))


def test_several_adapters_by_vmap() -> None:
    """Gradients of three adapters over one model at once."""
    own = lora.Config(rank=2)
    params = filled(tiny.CONFIG, own, torch.float64)
    mine, base = lora.split(params)
    several = [tree.map(lambda x, k=k: x * (1 + k), mine) for k in range(3)]
    batch = tiny.batch(tiny.encoded("A"))

    def loss(adapters: Any) -> Tensor:
        return qwen3_vl.loss(tree.combine(adapters, base), batch, tiny.CONFIG)

    stacked = tree.map(lambda *each: torch.stack(each), *several)
    grads, values = torch.func.vmap(torch.func.grad_and_value(loss))(stacked)
    for number, adapters in enumerate(several):
        value, grad = value_and_grad(loss)(adapters)
        torch.testing.assert_close(values[number], value)
        for a, b in zip(tree.leaves(grads), tree.leaves(grad), strict=True):
            torch.testing.assert_close(a[number], b)


def test_dropout_is_a_function_of_its_key() -> None:
    """The mean over keys is the value without; the same key gives the same; none in evaluation."""
    own = lora.Config(rank=4, dropout=0.25)
    params = filled(tiny.CONFIG, own)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))

    node = params.text.layers[0].mlp.gate

    def apply(key: int | None) -> Tensor:
        found = node if key is None else lora.keyed(node, torch.tensor(key))
        applied: Tensor = found.linear(x, None, 1)
        return applied

    whole = apply(None)
    assert torch.equal(apply(3), apply(3))
    assert not torch.equal(apply(3), apply(4))
    mean = torch.stack([apply(key) for key in range(800)]).mean(0)
    change = whole - x @ node.weight.T
    assert float((mean - whole).norm() / change.norm()) < 0.05
    other = lora.keyed(params, torch.tensor(3)).text.layers[0].mlp.up.key
    assert other != lora.keyed(params, torch.tensor(3)).text.layers[0].mlp.gate.key
