"""What may differ where a run goes on."""

from pathlib import Path
from typing import Any

from mmfn import config, files
from mmfn.recipes.qwen3vl_config import Config

FREE = {
    *("mesh", "data.rows", "train.accumulate"),
    *(f"sharding.{name}" for name in ("rules", "sequence", "regather", "prefetch")),
    *(f"sharding.{name}" for name in ("check", "timeout", "experts", "chunks", "slots", "room")),
    *(f"run.{name}" for name in ("resume", "out", "verbose", "traceback", "export")),
    *("run.export_form", "model.form", "lora.merge"),
    *(f"run.{name}" for name in ("save_every", "save_behind", "keep", "peak_flops")),
    *(f"data.{name}" for name in ("eval", "workers", "eval_samples", "answer_tokens")),
}
"""What may change when a run goes on: nothing that its numbers depend on but by rounding. Ranks,
rows and micro-batches may be others where a step reads the same rows (`rows_per_step`)."""


def refuse_other(cfg: Config, folder: Path, data_ranks: int) -> None:
    """Refuse to go on with a run of another config, on other data, or with other steps.

    Raises:
        ValueError: names each flag that differs, with both values, or the file that changed.
    """
    before, now = (_flat(d) for d in (files.read_json(folder / "config.json"), config.to_dict(cfg)))
    changed = [
        f"--{name.replace('_', '-')} was {before.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if name not in FREE and before.get(name) != value
    ]
    if changed:
        raise ValueError(f"{folder} is a run of another config: {'; '.join(changed)}")
    about = files.read_json(folder / "about.json")
    rows = rows_per_step(cfg, data_ranks)
    if about.get("rows_per_step") != rows:
        raise ValueError(
            f"a step of {folder} reads {about.get('rows_per_step')} rows; --data.rows="
            f"{cfg.data.rows}, --train.accumulate={cfg.train.accumulate} and {data_ranks} data "
            f"ranks make {rows}"
        )
    digest = about.get("train_sha256")
    if cfg.data.train is not None and digest != files.digest(cfg.data.train):
        raise ValueError(
            f"--data.train={cfg.data.train} is not the file that the run in {folder} began with"
        )


def rows_per_step(cfg: Config, data_ranks: int) -> int:
    """Count the rows that an optimizer step reads on all ranks."""
    return cfg.data.rows * cfg.train.accumulate * data_ranks


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
