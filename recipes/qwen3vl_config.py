"""The flags of the recipe, their defaults, and what cannot be combined."""

import math
from pathlib import Path
from typing import Literal

import attrs

from mmfn import lora, optim, schedules
from mmfn.optim import Group


@attrs.frozen
class Model:
    """What is trained."""

    path: Path | None = None
    """Hugging Face folder of a Qwen3-VL, dense or with experts; without one a small model is
    trained from scratch."""
    form: Literal["auto", "hub", "transformers", "per_expert"] = "auto"
    """Layout of the experts in it, where its tensors leave that open: as published, as
    transformers 5 writes them, or a tensor for each expert."""
    experts: int = 0
    """Experts of each block of the small model, two of them for a token; 0 has none."""


@attrs.frozen
class Data:
    """What it is trained on."""

    train: Path | None = None
    """Chat samples, .json or .jsonl: `conversations` or `messages`; without one, digits."""
    digits: Literal["auto", "light", "dark"] = "auto"
    """How the embedded digits are shown, in place of --data.train: light on dark or dark on light;
    auto is light, where there is no --model.path."""
    eval: Path | None = None
    """Held-out samples in the same form."""
    media_root: Path | None = None
    """Folder of the pictures; by default that of the file that names them."""
    row_tokens: int | None = None
    """Tokens of a row, which holds many samples; 4096, or 1024 for the digits."""
    rows: int = 1
    """Rows of a micro-batch."""
    max_tokens: int | None = None
    """Longest sample, in tokens; by default a row."""
    on_long: Literal["raise", "drop"] = "raise"
    """What to do about a longer one."""
    on_bad: Literal["raise", "skip"] = "raise"
    """What to do about a sample that is not understood or has unreadable media."""
    max_bad: float = 0.01
    """Share of the samples that may be skipped as bad before the run ends."""
    min_pixels: int | None = None
    """Smallest picture, in pixels; by default as the model's folder says."""
    max_pixels: int | None = None
    """Largest picture, in pixels; by default as the model's folder says."""
    workers: int = 1
    """Processes that read ahead; 0 reads in the main one."""
    shuffle: bool = True
    """Whether each epoch has its own order."""
    eval_samples: int = 64
    """Held-out questions that are answered at each evaluation but the last, which has all."""
    answer_tokens: int = 64
    """Longest answer when held-out questions are asked, in tokens."""


@attrs.frozen
class Optimizer:
    """How weights move."""

    lr: float | None = None
    """Peak learning rate; 1e-5, or 2e-3 for the digits."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two running means."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Per unit of learning rate; norms and biases have none."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after warm-up."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises from 0."""
    floor: float = 0.0
    """Share of the peak rate that is left at the end."""
    rules: tuple[str, ...] = ()
    """PATTERN:SCALE:DECAY for weights whose path matches: `vision.*:0.1:0`; first match wins."""

    def parsed_rules(self) -> tuple[tuple[str, Group], ...]:
        """Read the rules.

        Raises:
            ValueError: a rule is not of the form; names it.
        """
        found = []
        for rule in self.rules:
            try:
                pattern, scale, decay = rule.split(":")
                group = Group(float(scale), float(decay))
            except ValueError:
                raise ValueError(
                    f"--optimizer.rules: {rule!r} is not PATTERN:SCALE:DECAY"
                ) from None
            if not (0 <= group.scale < math.inf and 0 <= group.decay < math.inf):
                raise ValueError(
                    f"--optimizer.rules: {rule!r} needs a scale and a decay from 0 to below inf"
                )
            found.append((pattern, group))
        return tuple(found)

    def make_schedule(self, steps: int) -> optim.Schedule:
        """Make the schedule of a run of so many steps."""
        assert self.lr is not None
        warm = min(int(steps * self.warmup), steps - 1)
        if self.schedule == "constant":
            return schedules.constant(self.lr, warm)
        shape = schedules.cosine if self.schedule == "cosine" else schedules.linear
        return shape(self.lr, steps, warm, self.floor)


@attrs.frozen
class Train:
    """How long, and in which pieces."""

    steps: int | None = None
    """Optimizer steps; or give --train.epochs."""
    epochs: int | None = None
    """Passes over the data; 1 if neither is given, for the digits a fixed number of steps."""
    accumulate: int = 1
    """Micro-batches of an optimizer step."""
    balance: float = 0.0
    """Weight of the balance loss of experts, over the whole step; a second forward pass where
    --train.accumulate is more than 1."""
    normalise: Literal["token", "sample", "row"] = "token"
    """What the loss is the mean of; `row` depends on how samples are packed."""
    precision: Literal["float32", "bfloat16"] | None = None
    """What is computed in; bfloat16, or float32 for the digits. Weights are always float32."""
    loss_rows: int = 0
    """Targets whose logits exist at a time, and are not kept: less memory where the vocabulary is
    large; 0 keeps the logits of all."""
    remat: bool = False
    """Keep only inputs of blocks, run them again backward: less memory, a third more work."""
    freeze: tuple[str, ...] = ()
    """What is not trained: parts of the model (text, head, tower, mergers), or patterns of paths:
    `vision.*`."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a gradient that is not finite; its step is never taken."""


@attrs.frozen
class Lora:
    """Adapters that are trained beside weights that stay."""

    rank: int = 0
    """Of the change of each adapted weight; 0 trains the weights themselves."""
    targets: tuple[str, ...] = ("linear",)
    """What is adapted: `linear` is all matrices of blocks and mergers, those of experts too; parts
    of the model (text, head, tower, mergers); published names (`q_proj`); or patterns of paths."""
    alpha: float = 16.0
    """The change is scaled by alpha / rank."""
    root: bool = False
    """Scale it by alpha / sqrt(rank) (rsLoRA)."""
    dropout: float = 0.0
    """Share of the inputs of adapters that are left out in training."""
    magnitude: bool = False
    """Train the length of each row apart (DoRA)."""
    initial: Literal["kaiming", "gaussian"] = "kaiming"
    """Spread of the first matrices at the start."""
    path: Path | None = None
    """Folder of adapters to begin with, as PEFT or an earlier run wrote it."""
    also: tuple[str, ...] = ()
    """What is trained whole besides: parts of the model, or patterns of paths; needs
    --lora.merge."""
    merge: bool = False
    """Export the whole model with the adapters added up, not only the adapters."""

    def config(self) -> lora.Config:
        """Give what the library takes.

        Raises:
            ValueError: a number is out of range; names its flag.
        """
        try:
            return lora.Config(
                self.targets, self.rank, self.alpha, self.root, self.dropout, self.magnitude,
                self.initial,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"--lora.{error}") from None


@attrs.frozen
class Run:
    """Where and how."""

    out: Path | None = None
    """Run folder; by default a new one under runs/."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --run.out."""
    seed: int = 0
    """Of initial weights and order of data."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """auto is a GPU if there is one, else the CPU."""
    compile: Literal["none", "blocks", "step"] = "none"
    """Compile nothing, blocks and loss each as a graph, or the whole step as one."""
    save_every: int = 500
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints that are kept."""
    save_behind: bool = False
    """Write checkpoints while steps go on, from a copy of the state on the host."""
    export: bool = True
    """Write the weights as a Hugging Face folder at the end."""
    export_form: Literal["auto", "hub", "transformers", "per_expert"] = "auto"
    """Layout of experts in it; by default that of --model.path, or hub."""
    peak_flops: float | None = None
    """Peak rate of the device in FLOP/s, for mfu; by default from a table, on a CPU measured."""
    verbose: bool = False
    """Print the table of all weights at the start."""
    traceback: bool = False
    """Show where in the code an error arose."""


@attrs.frozen
class Sharding:
    """How weights and work are cut over the ranks of --mesh."""

    rules: tuple[str, ...] = ()
    """Name of a table, then AXIS=MESH_AXIS changes: `fsdp_tp vocab=`; by default what fits --mesh.
    Tables: fsdp, fsdp_tp, fsdp_tp_text (the tower whole on the ranks of tp)."""
    sequence: bool = True
    """Cut tokens over tp between attention and feed-forward layers: less memory, same traffic."""
    regather: bool = True
    """Gather weights again backward (ZeRO-3); --sharding.no-regather keeps them (ZeRO-2)."""
    prefetch: bool = True
    """Start the next layer's gather before a layer is computed."""
    experts: Literal["exchanged", "balanced", "gathered", "bounded"] = "exchanged"
    """How tokens come to experts of other ranks (ep): as many rows as there are; the same with
    copies of the fullest experts on idle ranks; all tokens to all ranks, better where ep is below
    the experts of a token; or a fixed number of rows."""
    chunks: int = 1
    """Parts in which they are exchanged, so that one is computed while the next is on its way."""
    slots: int = 2
    """Copies on a rank at most, for `balanced`."""
    room: float = 2.0
    """Rows of `bounded`, in times those of an even routing; a step that needs more ends the run."""
    check: bool = False
    """Compare each collective over the ranks first: slow, finds calls in a wrong order."""
    timeout: int = 600
    """Seconds that a rank waits for others before the run ends."""


@attrs.frozen
class Config:
    """All flags."""

    mesh: str = ""
    """Ranks by axis, under torchrun: "fsdp=4 tp=2"; axes dp, fsdp, cp, tp, ulysses, the part of cp
    that exchanges heads (the rest is a ring), and ep, the part of fsdp · cp that experts are cut
    over; one may be left open (`fsdp=`); default all fsdp."""
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    lora: Lora = Lora()
    sharding: Sharding = Sharding()
    run: Run = Run()
