"""Configs in Hugging Face's form: values are read, code never."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from mmfn.models import hub
from mmfn.models.presets import PRESETS


@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
def test_a_config_survives_the_way_there_and_back(name: str, tmp_path: Path) -> None:
    """Written as transformers reads it, and read again."""
    cfg = tiny.CONFIG if name == "tiny" else PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(hub.to_hub(cfg)))
    assert hub.read_config(tmp_path) == cfg


def test_the_spelling_of_the_published_files_is_read() -> None:
    """They say `rope_scaling` and `rope_theta` apart, as transformers 4.57 wrote them."""
    values = hub.to_hub(PRESETS["8B"])
    text = values["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    assert hub.from_hub(values) == PRESETS["8B"]


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ((), "model_type", "llava", "model_type='llava' is none of qwen3_vl, qwen3_vl_moe"),
        ((), "text_config", {}, "text_config is missing or empty"),
        (("text_config",), "attention_bias", True, "attention_bias=True"),
        (("text_config",), "hidden_act", "gelu", "hidden_act='gelu'"),
        (("vision_config",), "hidden_act", "silu", "hidden_act='silu'"),
        (("text_config",), "num_key_value_heads", 3, "heads=16 is not a multiple of kv_heads=3"),
        (("text_config", "rope_parameters"), "mrope_section", [9, 9, 9], "do not sum to half"),
        (("vision_config",), "out_hidden_size", 7, "vision out=7 is not embed=2048"),
    ],
)
def test_what_this_model_does_not_have_is_refused_by_name(
    place: tuple[str, ...], key: str, value: Any, message: str
) -> None:
    """With the value found and the one needed."""
    values = hub.to_hub(PRESETS["2B"])
    inner = values
    for name in place:
        inner = inner[name]
    inner[key] = value
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        hub.from_hub(values)


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    """Case Z04: `auto_map` names a module that would leave a mark."""
    values = hub.to_hub(tiny.CONFIG) | {"auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    assert hub.read_config(tmp_path) == tiny.CONFIG
    assert not (tmp_path / "mark").exists()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    """Missing, or no JSON; named."""
    with pytest.raises(ValueError, match=r"no config\.json in "):
        hub.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        hub.read_config(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "num_hidden_layers", 10_000_000),
        ("text_config", "num_hidden_layers", "4"),
        ("text_config", "num_attention_heads", 0),
        ("vision_config", "depth", -1),
    ],
)
def test_a_size_that_is_not_believed_is_refused_by_name(
    section: str, key: str, value: object
) -> None:
    """Before a tree of that many layers is built."""
    values = hub.to_hub(PRESETS["2B"])
    values[section][key] = value
    with pytest.raises(ValueError, match=rf"c.json: .*{key}"):
        hub.from_hub(values, "c.json")


@pytest.mark.parametrize("value", ["x", [1], 3])
def test_a_section_that_is_no_object_is_refused(value: object) -> None:
    """With the file in the message, whatever transformers raises."""
    values = {**hub.to_hub(PRESETS["2B"]), "text_config": value}
    with pytest.raises(ValueError, match=r"c\.json: "):
        hub.from_hub(values, "c.json")
