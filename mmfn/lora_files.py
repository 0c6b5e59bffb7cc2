"""Adapters as the folders that PEFT reads and writes.

Source: PEFT 0.17 and later (Hugging Face): keys, `adapter_config.json`, parameters of experts.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmfn import files as disk
from mmfn import lora, param, tree, weights
from mmfn.lora import Adapted, Config
from mmfn.param import Place
from mmfn.weights_export import export

CONFIG = "adapter_config.json"
NAME = "adapter_model"


def save(
    adapters: Any,
    adapted: Any,
    cfg: Config,
    folder: Path,
    *,
    base: str = "",
    fetch: Callable[[Tensor], Tensor] = lambda value: value,
    write: bool = True,
) -> None:
    """Write the adapters of a tree, which `PeftModel.from_pretrained` reads over the base model.

    `adapters` is the first half of `lora.split`, `adapted` the tree of `Param`s, and `base` the
    name or folder of the model below. All ranks call this, and one of them does `write`.

    Raises:
        ValueError: `adapters` has a weight that is no adapter, or as `weights_export.export`.
    """
    abstract, _ = lora.split(adapted)
    if more := sorted(set(tree.paths(adapters)) - set(tree.paths(abstract))):
        raise ValueError(f"{more[0]} is trained and is no adapter: a folder of PEFT has no room")
    text = json.dumps(to_peft(adapted, cfg, base), indent=2)
    export(
        adapters, abstract, folder, files={CONFIG: text}, form="peft", name=NAME, fetch=fetch,
        write=write,
    )  # fmt: skip


def to_peft(adapted: Any, cfg: Config, base: str) -> dict[str, Any]:
    """Write what is adapted as the values of an `adapter_config.json`; names are whole."""
    keys = [node.weight.key for _, node in tree.nodes(Adapted, adapted)]
    modules = [key.removesuffix(".weight") for key in keys if key.endswith(".weight")]
    parameters = [key for key in keys if not key.endswith(".weight")]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": cfg.dropout,
        "use_rslora": cfg.root,
        "use_dora": cfg.magnitude,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        # PEFT takes an empty list for one that matches nothing.
        "target_modules": modules or None,
        "target_parameters": parameters or None,
    }


def load(adapted: Any, cfg: Config, folder: Path, *, place: Place = param.whole) -> Any:
    """Read the adapters of a tree of `Param`s, in float32: the first half of `lora.split`.

    Raises:
        ValueError: the folder has other adapters than the tree, or others of its numbers differ;
            names them, with how many are missing and unexpected; or as `weights.load`.
    """
    read = disk.read_json(folder / CONFIG)
    wanted = to_peft(adapted, cfg, "")
    for key in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"):
        if read.get(key, wanted[key]) != wanted[key]:
            raise ValueError(
                f"{folder / CONFIG}: {key} is {read[key]!r}; the run has {wanted[key]!r}"
            )
    _refuse_patterns(folder, read)
    abstract, _ = lora.split(adapted)
    return weights.load(abstract, folder, place=place, form="peft")


def _refuse_patterns(folder: Path, read: Mapping[str, Any]) -> None:
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"):
        if read.get(key):
            raise ValueError(f"{folder / CONFIG}: {key}={read[key]!r} is not understood")
    if read.get("bias", "none") != "none":
        raise ValueError(f"{folder / CONFIG}: bias={read['bias']!r} is not understood")
