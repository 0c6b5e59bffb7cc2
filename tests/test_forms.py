"""Published layouts of experts: told by all tensors of a folder, never by one shape that may
coincide; written as they were read unless asked otherwise."""

import json
from pathlib import Path

import attrs
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeForConditionalGeneration

from mmfn import param, tree, weights
from mmfn.models import hub, moe, qwen3_vl
from mmfn.param import Form, Param
from mmfn.weights_export import export

FORMS = ("hub", "transformers", "per_expert")


def config(mlp: int) -> qwen3_vl.Config:
    """Give experts another inner width: 16 makes gate and value square, 32 the way down."""
    return attrs.evolve(tiny.MOE, experts=moe.Config(experts=4, choices=2, mlp=mlp))


def write(cfg: qwen3_vl.Config, folder: Path, form: str) -> Path:
    """Write the tiny weights in a form."""
    files = {"config.json": json.dumps(hub.to_hub(cfg))}
    export(tiny.params(cfg), qwen3_vl.abstract(cfg), folder, form=form, files=files)
    return folder


def loss(params: qwen3_vl.Qwen3VL, cfg: qwen3_vl.Config) -> float:
    """Give the loss of A's last four."""
    return qwen3_vl.loss(params, tiny.batch(tiny.encoded("A", "last4")), cfg).item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mlp", "value"), [(24, 5.016264), (16, 5.352146), (32, 5.154753)])
def test_every_form_is_read_as_the_same_weights(
    tmp_path: Path, mlp: int, value: float, form: str
) -> None:
    """Where one tensor is square the other tells (turned, the losses are 9.049205 or 5.397856);
    and what is exported is what was read."""
    cfg = config(mlp)
    abstract = qwen3_vl.abstract(cfg)
    source = write(cfg, tmp_path / "source", form)
    params = weights.load(abstract, source)
    assert loss(params, cfg) == pytest.approx(value, abs=1e-5)
    export(params, abstract, tmp_path / "again", source=source)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_gate_and_value_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Halves swapped give 5.015184, weights of a token that do not sum to one 5.033835."""
    cfg = config(24)
    params = weights.load(qwen3_vl.abstract(cfg), write(cfg, tmp_path / "a", "per_expert"))
    swapped = tree.map_with_path(
        lambda path, leaf: leaf.flip(2) if path.endswith("gate_up") else leaf, params
    )
    assert loss(swapped, cfg) == pytest.approx(5.015184, abs=1e-5)
    loose = attrs.evolve(cfg, experts=attrs.evolve(cfg.experts, normalise=False))
    assert loss(params, loose) == pytest.approx(5.033835, abs=1e-5)


@pytest.mark.parametrize("form", ["hub", "transformers"])
def test_transformers_reads_what_is_exported(tmp_path: Path, form: str) -> None:
    """The same logits, float32, from both of the layouts that it reads."""
    cfg = config(24)
    folder = write(cfg, tmp_path / "a", form)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tiny.batch(tiny.encoded("T"), tokens=7)
    ours = qwen3_vl.forward(tiny.params(cfg), batch, cfg)
    ids = batch.tokens[None]
    theirs = model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids).int()).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_layouts_that_are_mixed_or_cannot_be_told_are_refused(tmp_path: Path) -> None:
    """With a tensor of each, or with the option that states it."""
    cfg = config(24)
    abstract = qwen3_vl.abstract(cfg)
    file = write(cfg, tmp_path / "a", "hub") / "model.safetensors"
    tensors = load_file(file)
    key = "model.language_model.layers.1.mlp.experts.down_proj"
    tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"gate_up_proj is in form hub, .*down_proj is in form tra"
    ):
        weights.load(abstract, tmp_path / "a")
    with pytest.raises(ValueError, match=r"1 of the wrong shape .*layers.1.mlp.experts.down_proj"):
        weights.load(abstract, tmp_path / "a", form="hub")

    square = {
        "w": Param(
            (3, 3), "expert embed", "w", form="flat", forms=(Form("turned", "embed expert", "w"),)
        )
    }
    (tmp_path / "b").mkdir()
    save_file({"w": torch.arange(9.0).view(3, 3)}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ValueError, match=r"fits the forms flat and turned alike.*--model.form"):
        weights.load(square, tmp_path / "b")
    found = weights.load(square, tmp_path / "b", form="turned")["w"]
    assert torch.equal(found, torch.arange(9.0).view(3, 3).T)
    with pytest.raises(ValueError, match="w has no form 'other'; there are flat, turned"):
        weights.load(square, tmp_path / "b", form="other")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """Of one tensor for each, the key that lacks."""
    cfg = config(24)
    file = write(cfg, tmp_path / "a", "per_expert") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.language_model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"1 missing \(.*layers.2.mlp.experts.3.up_proj.weight\)"):
        weights.load(qwen3_vl.abstract(cfg), tmp_path / "a")


def test_a_part_of_the_experts_is_read_from_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank holds: some experts, some channels; read some rows at a time."""
    monkeypatch.setattr(weights, "READ_VALUES", 700)
    cfg = config(24)
    abstract = qwen3_vl.abstract(cfg)
    whole = tiny.params(cfg)

    def place(path: str, leaf: Param):
        part = [slice(0, size) for size in leaf.shape]
        for dim, axis in enumerate(leaf.axes):
            if axis in ("expert", "mlp"):
                part[dim] = slice(leaf.shape[dim] // 2, leaf.shape[dim])
        return tuple(part), lambda value: value

    for form in FORMS:
        folder = write(cfg, tmp_path / form, form)
        parts = weights.load(abstract, folder, place=place)
        for (path, leaf), want, got in zip(
            tree.items(abstract), tree.leaves(whole), tree.leaves(parts), strict=True
        ):
            assert torch.equal(got, want[place(path, leaf)[0]]), (form, path)
        assert param.count(parts) < param.count(whole)
