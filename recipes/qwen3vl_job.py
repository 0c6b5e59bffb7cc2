"""What a run of the recipe works on: model, tokenizer, samples; from folders or embedded."""

import fnmatch
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers

import mmfn
from mmfn import files, lora, param, tree
from mmfn.data import chat as chats
from mmfn.data import digits, formats, media
from mmfn.data import tokenizer as tokenizers
from mmfn.data.encoded import Geometry
from mmfn.data.sample import Sample
from mmfn.device import Device
from mmfn.evaluate import Answer
from mmfn.experts import Experts
from mmfn.models import hub, moe, qwen3_vl, vision
from mmfn.recipes.qwen3vl_config import Config
from mmfn.recipes.qwen3vl_resume import rows_per_step
from mmfn.report import Shown
from mmfn.sharding import parallel as parallels
from mmfn.sharding import rules as tables
from mmfn.sharding.axes import Axis
from mmfn.sharding.experts import balanced, bounded, exchanged, gathered
from mmfn.sharding.mesh import Mesh
from mmfn.sharding.parallel import Parallel


@attrs.frozen(eq=False)
class Job:
    """All that a run needs besides its flags."""

    config: qwen3_vl.Config
    abstract: Any
    chat: chats.Chat
    geometry: Geometry
    train: Sequence[Sample]
    held_out: Sequence[Sample]
    root: Path
    """Folder that the training samples' pictures are in."""
    held_out_root: Path
    """Folder that the held-out samples' pictures are in."""
    trained: Callable[[str, Any], bool]
    """Whether the weight of this path is trained."""
    files: Mapping[str, bytes | str]
    """What an exported folder holds besides weights, where no source folder has it."""

    @property
    def headline(self) -> str:
        """Say in a line what is trained on what."""
        total = param.count(self.abstract)
        kept, _ = tree.partition(self.trained, self.abstract)
        return (
            f"Qwen3-VL of {total:,} parameters, {param.count(kept):,} of them trained, "
            f"on {len(self.train):,} samples; {len(self.held_out):,} held out"
        )


def parallel(cfg: Config, job: Job, mesh: Mesh) -> Parallel:
    """Put the job's model on a mesh by the table of the flags, or by one that fits.

    Raises:
        ValueError: the mesh does not fit the model, or the table neither; says the numbers.
    """
    model, sizes = job.config, mesh.sizes
    if cfg.sharding.rules:
        rules = tables.parse(cfg.sharding.rules)
    elif sizes.tp == 1:
        rules = tables.FSDP
    else:
        fits = model.vision.heads % sizes.tp == 0
        rules = tables.FSDP_TP if fits else tables.FSDP_TP_TEXT
    rules = tables.for_heads(
        rules, sizes, kv_heads=model.kv_heads, groups=model.heads // model.kv_heads
    )
    if mesh.ep.size == 1:
        own = cfg.sharding
        if (own.experts, own.chunks) != ("exchanged", 1):
            raise ValueError(
                f"--sharding.experts={own.experts} and --sharding.chunks={own.chunks} have no "
                f"effect without ep in --mesh"
            )
    elif cfg.run.compile != "none" and cfg.sharding.experts in ("exchanged", "balanced"):
        raise ValueError(
            f"--run.compile={cfg.run.compile} needs static shapes, --sharding.experts=gathered or "
            f"bounded; {cfg.sharding.experts} waits for numbers of rows"
        )
    if cfg.lora.magnitude and sizes.tp > 1:
        raise ValueError(
            f"--lora.magnitude needs whole rows of weights, which tp={sizes.tp} in --mesh cuts"
        )
    experts: dict[str, Callable[[Axis], Experts]] = {
        "exchanged": partial(exchanged, chunks=cfg.sharding.chunks),
        "balanced": partial(balanced, slots=cfg.sharding.slots),
        "gathered": gathered,
        "bounded": partial(bounded, room=cfg.sharding.room),
    }
    return parallels.make(
        job.abstract,
        mesh,
        rules,
        sequence=cfg.sharding.sequence,
        experts=experts[cfg.sharding.experts],
        dropless=gathered if cfg.sharding.experts == "bounded" else None,
    )


DIGITS = 14380
"""Samples of an epoch of digits: each picture alone five times, turned and moved a little, and as
many pairs. A short run makes only what it can read."""


def load(cfg: Config) -> Job:
    """Read model config, tokenizer and samples: cheap things first, weights not at all."""
    assert cfg.data.max_tokens is not None
    if cfg.model.path is not None and not cfg.model.path.is_dir():
        raise ValueError(f"--model.path={cfg.model.path} is not a folder")
    for flag, path in (("--data.train", cfg.data.train), ("--data.eval", cfg.data.eval)):
        if path is not None and not path.is_file():
            raise ValueError(f"{flag}={path} is not a file")
    model, chat, published = _small(cfg) if cfg.model.path is None else _published(cfg)
    if cfg.data.train is None:
        dark = cfg.data.digits == "dark"
        train = digits.train(cfg.run.seed, _wanted(cfg), vary=True, dark=dark)
        held_out = digits.held_out(dark=dark)
        return _job(cfg, model, chat, train, held_out, (Path(), Path()), published)
    root = cfg.data.media_root or cfg.data.train.parent
    other = cfg.data.media_root or (cfg.data.eval or cfg.data.train).parent
    if not root.is_dir():
        raise ValueError(f"--data.media-root={root} is not a folder")
    asked = formats.read(cfg.data.eval) if cfg.data.eval is not None else ()
    return _job(cfg, model, chat, formats.read(cfg.data.train), asked, (root, other), published)


Parts = tuple[qwen3_vl.Config, chats.Chat, Mapping[str, bytes | str]]


def _published(cfg: Config) -> Parts:
    """Read the model's config and what makes tokens and patches of a chat."""
    assert cfg.model.path is not None
    assert cfg.data.max_tokens is not None
    model = hub.read_config(cfg.model.path)
    chat = chats.load(cfg.model.path, cfg.data.max_tokens)
    return model, attrs.evolve(chat, pixels=_budget(chat.pixels, cfg)), {}


def _small(cfg: Config) -> Parts:
    """Make a small model of the same architecture, for the digits, and the files it needs."""
    assert cfg.data.max_tokens is not None
    tokenizer = tokenizers.build(digits.texts(), vocab=320)
    special = chats.special_of(tokenizer)
    vocab = -(-len(tokenizer) // 32) * 32
    model = qwen3_vl.Config(
        vocab=vocab, embed=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384,
        theta=10000.0, sections=(8, 4, 4), tied=True, experts=_experts(cfg.model.experts),
        image_token=special.image_pad, video_token=special.video_pad,
        vision_start_token=special.vision_start, vision_end_token=special.vision_end,
        vision=vision.Config(
            layers=4, embed=96, heads=4, mlp=288, patch=8, places=64, out=128, deepstack=(0, 1, 2)
        ),
    )  # fmt: skip
    half = (0.5, 0.5, 0.5)
    pixels = media.Pixels(8, 2, 2, min_pixels=256, max_pixels=65536, mean=half, std=half)
    chat = chats.Chat(tokenizer, _budget(pixels, cfg), special, cfg.data.max_tokens)
    published: dict[str, bytes | str] = {
        "config.json": json.dumps(hub.to_hub(model), indent=2),
        "preprocessor_config.json": json.dumps(_processor(pixels), indent=2),
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        published |= {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}
    return model, chat, published


def _wanted(cfg: Config) -> int:
    """Give how many samples of digits a run can read."""
    assert cfg.data.row_tokens is not None
    # The shortest sample has 26 tokens. Rows a step are not asked: other ranks may take them over.
    return min(DIGITS, max((cfg.train.steps or DIGITS) * 8 * cfg.data.row_tokens // 26, 64))


def _experts(experts: int) -> moe.Config | None:
    """Make those of the small model: as many channels for a token as without any."""
    return moe.Config(experts, min(2, experts), 384 // min(2, experts)) if experts else None


def _processor(pixels: media.Pixels) -> dict[str, Any]:
    """Write a pixel budget as the values of a `preprocessor_config.json`."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels},
        "patch_size": pixels.patch,
        "temporal_patch_size": pixels.temporal,
        "merge_size": pixels.merge,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
    }


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _budget(pixels: media.Pixels, cfg: Config) -> media.Pixels:
    return attrs.evolve(
        pixels,
        min_pixels=_given(cfg.data.min_pixels, pixels.min_pixels),
        max_pixels=_given(cfg.data.max_pixels, pixels.max_pixels),
    )


def _job(
    cfg: Config,
    model: qwen3_vl.Config,
    chat: chats.Chat,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    roots: tuple[Path, Path],
    published: Mapping[str, bytes | str],
) -> Job:
    tower = model.vision
    if model.experts is None and cfg.train.balance:
        raise ValueError(f"--train.balance={cfg.train.balance} has no effect without experts")
    abstract = qwen3_vl.abstract(model)
    if cfg.lora.rank:
        abstract = _adapted(cfg, abstract)
    kept = _trained(cfg, abstract)
    return Job(
        config=model,
        abstract=abstract,
        chat=chat,
        geometry=Geometry(tower.merge, tower.side, tower.patch_dim),
        train=train,
        held_out=held_out,
        root=roots[0],
        held_out_root=roots[1],
        trained=lambda path, leaf: path in kept,
        files=published,
    )


def _adapted(cfg: Config, abstract: qwen3_vl.Qwen3VL) -> Any:
    try:
        return lora.adapt(abstract, cfg.lora.config(), qwen3_vl.GROUPS)
    except ValueError as error:
        raise ValueError(f"--lora.targets: {error}") from None


def _trained(cfg: Config, abstract: Any) -> set[str]:
    """List the paths of what is trained.

    Raises:
        ValueError: a pattern matches no weight, or nothing is left; names the flag.
    """
    paths = tree.paths(abstract)

    def matching(flag: str, names: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            here = [
                p for own in qwen3_vl.GROUPS.get(name, (name,)) for p in fnmatch.filter(paths, own)
            ]
            if not here:
                raise ValueError(
                    f"{flag} {name!r} matches no weight; there are "
                    f"{', '.join(qwen3_vl.GROUPS)} and patterns of paths, see --run.verbose"
                )
            found.update(here)
        return found

    kept = set(paths)
    if cfg.lora.rank:
        kept = set(lora.paths(abstract)) | matching("--lora.also", cfg.lora.also)
    kept -= matching("--train.freeze", cfg.train.freeze)
    if not kept:
        raise ValueError(f"--train.freeze {' '.join(cfg.train.freeze)} leaves nothing to train")
    return kept


def about(cfg: Config, device: Device, mesh: Mesh) -> dict[str, Any]:
    """Say what ran: versions, commit, device."""
    return {
        "mmfn": mmfn.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.name,
        "mesh": str(mesh.sizes),
        "rows_per_step": rows_per_step(cfg, mesh.sizes.data),
        "train_sha256": None if cfg.data.train is None else files.digest(cfg.data.train),
    }


def _commit() -> str:
    """Give the commit of this checkout, marked where it has changes; `none` outside of one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        found = [
            subprocess.run(
                [*git, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return found[0] + ("+changes" if found[1] else "")


def choose(answers: Sequence[Answer], count: int) -> list[Answer]:
    """Choose some answers to show: wrong ones first, at most half, the rest spread over all."""
    wrong = [answer for answer in answers if not answer.right][: count // 2]
    right = [answer for answer in answers if answer.right]
    left = min(count - len(wrong), len(right))
    return wrong + [right[i * len(right) // left] for i in range(left)]


def show(answer: Answer, job: Job) -> Shown:
    """Make what the report shows of an answer."""
    pictures = [media.open_image(image.source, job.held_out_root) for image in answer.sample.images]
    return Shown(pictures, answer.question, answer.expected, answer.given, answer.right)


def answer_table(answers: Sequence[Answer]) -> str:
    """Lay answers out as a table of text."""
    rows = [("question", "pictures", "expected", "answer", "")]
    for answer in answers:
        rows.append(
            (
                _short(answer.question.strip()),
                str(len(answer.sample.images)),
                _short(answer.expected),
                _short(answer.given),
                "right" if answer.right else "wrong",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
