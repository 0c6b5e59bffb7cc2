"""What is timed: sizes of the model, and conversations made by a seed, the same for every side."""

import attrs
import numpy as np

IMAGE, VIDEO, START, END = 5, 6, 7, 8
"""Ids that mark media; text is drawn from `TEXT` on."""
TEXT = 16
PATCH, MERGE, PATCH_TIME, CHANNELS = 16, 2, 2, 3
PATCH_DIM = CHANNELS * PATCH_TIME * PATCH**2


@attrs.frozen
class Conversation:
    """What a sample is like before its tokens are drawn."""

    length: int
    """Tokens."""
    side: int
    """Side in pixels of the picture that it begins with; 0 for none."""
    supervised: float
    """Part of its tokens, at its end, whose text is supervised."""


@attrs.frozen
class Shape:
    """A model and the conversations of one optimizer step."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vision_layers: int
    vision_embed: int
    vision_heads: int
    vision_mlp: int
    deepstack: tuple[int, ...]
    conversations: tuple[Conversation, ...]
    rows: int
    """Conversations in a micro-batch, for whoever pads them to one length."""
    experts: int = 0
    """Experts of each block; 0 for a dense model."""
    choices: int = 4
    """Experts of a token."""
    expert_mlp: int = 384

    @property
    def sections(self) -> tuple[int, int, int]:
        """Pairs of a head that are turned by time, row and column."""
        half = self.head_dim // 2
        return (half - 2 * (half // 4), half // 4, half // 4)

    @property
    def tokens(self) -> int:
        """Tokens of all conversations, without padding."""
        return sum(c.length for c in self.conversations)


@attrs.frozen(eq=False)
class Sample:
    """A conversation as numbers."""

    tokens: np.ndarray
    """Ids, int64, `[tokens]`."""
    supervised: np.ndarray
    """Whether a token is a target, bool, `[tokens]`."""
    grid: int
    """Rows, and columns, of patches of its picture; 0 for none. Its tokens start at token 1."""
    patches: np.ndarray
    """Values of the patches, float32, `[grid · grid, PATCH_DIM]`."""


def samples(shape: Shape, seed: int) -> list[Sample]:
    """Draw the conversations; text and pictures are noise, so a loss starts at log(vocab)."""
    random = np.random.default_rng(seed)
    made = []
    for conversation in shape.conversations:
        tokens = random.integers(TEXT, shape.vocab, conversation.length)
        grid = conversation.side // PATCH
        pictured = (grid // MERGE) ** 2
        if grid:
            tokens[0], tokens[1 : 1 + pictured], tokens[1 + pictured] = START, IMAGE, END
        first = conversation.length - round(conversation.supervised * conversation.length)
        supervised = (np.arange(conversation.length) >= first) & (tokens >= TEXT)
        patches = random.standard_normal((grid * grid, PATCH_DIM), dtype=np.float32)
        made.append(Sample(tokens, supervised, grid, patches))
    return made


def _chat(lengths: tuple[int, ...], side: int, supervised: float) -> tuple[Conversation, ...]:
    """Give every second conversation a picture, if it has room for it before what is supervised."""
    needed = (side // (PATCH * MERGE)) ** 2 + 2
    return tuple(
        Conversation(
            length,
            side if index % 2 == 0 and needed <= length - round(supervised * length) else 0,
            supervised,
        )
        for index, length in enumerate(lengths)
    )


MEDIUM = Shape(
    vocab=32768,
    embed=512,
    layers=8,
    heads=8,
    kv_heads=2,
    head_dim=64,
    mlp=1536,
    vision_layers=6,
    vision_embed=256,
    vision_heads=4,
    vision_mlp=512,
    deepstack=(1, 3, 4),
    conversations=(Conversation(512, 224, 1.0),) * 2,
    rows=2,
)
LENGTHS = (240, 204, 124, 295, 110, 24, 140, 72, 158, 85, 178, 58, 97, 390, 664, 41)

SHAPES = {
    "medium": MEDIUM,
    "chat": attrs.evolve(MEDIUM, conversations=_chat(LENGTHS, 224, 0.35), rows=4),
    "tiny": Shape(
        vocab=512,
        embed=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=96,
        vision_layers=3,
        vision_embed=32,
        vision_heads=2,
        vision_mlp=64,
        deepstack=(0, 1),
        conversations=_chat((40, 17, 30, 9), 64, 0.5),
        rows=2,
    ),
}
"""`medium`: two full rows, all text supervised. `chat`: lengths as they come, padding matters.
`tiny`: to see that everything runs; its times mean nothing."""
