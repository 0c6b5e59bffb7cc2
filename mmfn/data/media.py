"""Pictures: from a path or a data URL to normalised patches.

A picture is turned upright by its EXIF orientation before anything else. What the header says
(`size_of`) and what decoding gives (`open_image`) go through one function, `resize`, so a count
made from headers is the count of the patches.

Paths stay inside the media root, links resolved. Nothing here opens a connection.
"""

import base64
import binascii
import io
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from einops import rearrange, repeat
from jaxtyping import Float
from PIL import ExifTags, Image, UnidentifiedImageError

from mmfn import files

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""What is read. Other formats of the imaging library run outside programs or are no pictures."""

LARGEST_RATIO = 200
"""Of the longer side to the shorter. Source: the published preprocessing of Qwen2-VL."""

UPRIGHT: Mapping[Any, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture of each EXIF orientation upright. Source: Exif 2.3, tag 0x0112. The library
has a function for it, which also writes the notes of the camera anew and fails on odd ones."""

ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://|(?:file|https?|ftp):)", re.IGNORECASE)


@attrs.frozen
class Pixels:
    """How a picture becomes patches; read it from the folder of a model with `pixels_of`.

    Raises:
        ValueError: a size below one, or a budget that is empty or holds not even one block.
    """

    patch: int
    """Side of a patch in pixels."""
    temporal: int
    """Frames in a patch; a picture is repeated so often."""
    merge: int
    """Side of the block of patches that becomes one token."""
    min_pixels: int
    """Smaller pictures are enlarged to about this many pixels."""
    max_pixels: int
    """Larger pictures are reduced to at most this many pixels, but never below one block a side:
    very thin ones may stay above."""
    mean: tuple[float, float, float]
    """Of red, green and blue in [0, 1], subtracted."""
    std: tuple[float, float, float]
    """Of red, green and blue in [0, 1], divided by."""

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("patch", "temporal", "merge", "min_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, needs at least 1")
        if self.max_pixels < max(self.min_pixels, self.factor**2):
            raise ValueError(
                f"max_pixels={self.max_pixels} is less than min_pixels={self.min_pixels} "
                f"or one block of {self.factor}x{self.factor} pixels"
            )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std={self.std}, needs values above 0")

    @property
    def factor(self) -> int:
        """Side in pixels of the block that becomes one token."""
        return self.patch * self.merge

    @property
    def patch_dim(self) -> int:
        """Values in a patch."""
        return 3 * self.temporal * self.patch**2


def pixels_of(folder: Path | str) -> Pixels:
    """Read how a published model wants its pictures.

    From `preprocessor_config.json`, or the part `image_processor` of `processor_config.json`. Of
    the two spellings of the budget, `min_pixels` and `max_pixels` win over `size`, as they do in
    transformers.

    Raises:
        ValueError: a file or a key is missing, the patch differs from that of the model in
            `config.json`, or the folder asks for something that is not done here; names it.
    """
    folder = Path(folder)
    path = folder / "preprocessor_config.json"
    if path.is_file():
        found = files.read_json(path)
    else:
        path = folder / "processor_config.json"
        found = files.read_json(path).get("image_processor") or {}
    done = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    for key, value in {**done, "resample": 3, "rescale_factor": 1 / 255}.items():
        if found.get(key) not in (None, value):
            raise ValueError(f"{path} has {key}={found[key]!r}, needs {value!r}")
    size = found.get("size") or {}
    sizes = {
        "patch_size": found.get("patch_size"),
        "temporal_patch_size": found.get("temporal_patch_size"),
        "merge_size": found.get("merge_size"),
        "min_pixels": _first(found.get("min_pixels"), size.get("shortest_edge")),
        "max_pixels": _first(found.get("max_pixels"), size.get("longest_edge")),
    }
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{path} has {key}={value!r}, needs a whole number")
    _agree(folder / "config.json", sizes, path)
    colours = {
        key: _three(found.get(key), f"{path} has {key}") for key in ("image_mean", "image_std")
    }
    try:
        return Pixels(
            patch=sizes["patch_size"],
            temporal=sizes["temporal_patch_size"],
            merge=sizes["merge_size"],
            min_pixels=sizes["min_pixels"],
            max_pixels=sizes["max_pixels"],
            mean=colours["image_mean"],
            std=colours["image_std"],
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _agree(path: Path, sizes: Mapping[str, Any], other: Path) -> None:
    """Check the patch against the model's own, where its config is at hand."""
    if not path.is_file():
        return
    vision = files.read_json(path).get("vision_config") or {}
    keys = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    for key, model_key in keys.items():
        if model_key in vision and vision[model_key] != sizes[key]:
            raise ValueError(
                f"{other} has {key}={sizes[key]}, but {path} has "
                f"vision_config.{model_key}={vision[model_key]}"
            )


def _three(value: Any, found: str) -> tuple[float, float, float]:
    if not isinstance(value, list) or [type(v) in (int, float) for v in value] != [True] * 3:
        raise ValueError(f"{found}={value!r}, needs three numbers")
    red, green, blue = map(float, value)
    return red, green, blue


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def resize(height: int, width: int, pixels: Pixels) -> tuple[int, int]:
    """Give the height and width at which a picture of this size is read.

    Both are multiples of `pixels.factor`, at least one each; the ratio is kept as far as they
    allow. Halves are rounded to even.

    Raises:
        ValueError: a side of zero, or one more than 200 times the other.

    Source: the published preprocessing of Qwen2-VL (`smart_resize`).
    """
    if min(height, width) < 1:
        raise ValueError(f"{width}x{height} has no pixels")
    ratio = max(height, width) / min(height, width)
    if ratio > LARGEST_RATIO:
        raise ValueError(
            f"{width}x{height} has an aspect ratio of {ratio:.2f}, above {LARGEST_RATIO}"
        )
    factor = pixels.factor
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    if high * wide > pixels.max_pixels:
        scale = math.sqrt(height * width / pixels.max_pixels)
        high = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif high * wide < pixels.min_pixels:
        scale = math.sqrt(pixels.min_pixels / (height * width))
        high = math.ceil(height * scale / factor) * factor
        wide = math.ceil(width * scale / factor) * factor
    return high, wide


def locate(source: str, root: Path | str) -> Path:
    """Find a file of the media root, which may not be left: not by `..`, not by a link.

    An absolute path is fine where it leads into the root.

    Raises:
        ValueError: it is an address, lies outside, or is not a file; names it.
    """
    name = brief(source)
    if ADDRESS.match(source.strip()):
        raise ValueError(f"{name} is an address; only files and data URLs are read")
    try:
        inside = Path(root).resolve()
        path = (inside / source).resolve()
        found = path.stat() if path.is_relative_to(inside) and path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # Too long, links in a circle, a null.
        raise ValueError(f"{name} is no path in the media root {root}: {error}") from error
    if not path.is_relative_to(inside):
        raise ValueError(f"{name} lies outside the media root {root}")
    if found is None or not stat.S_ISREG(found.st_mode):
        cause = "is missing" if found is None else "is not a file"
        raise ValueError(f"{name} {cause} in the media root {root}")
    return path


def size_of(source: str, root: Path | str) -> tuple[int, int]:
    """Read the height and width of a picture, upright, without decoding it.

    One that lacks the mark of its end is decoded, to find now whether it is cut short.

    Raises:
        ValueError: it cannot be found or its header cannot be read; names it and says why.
    """
    with _opened(source, root) as image:
        kind: Any = image
        if image.format == "TIFF":  # Its `size` is upright or not, by version of the library.
            width, height = int(kind.tag_v2[256]), int(kind.tag_v2[257])
        else:
            width, height = image.size
        end = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(image.format or "")
        ended = end is None or end in _last_bytes(kind.fp)
        # A PNG would be decoded to see what stands after the pixels; that is seldom needed.
        late = image.format == "PNG" and _late_notes(kind.fp)
        exif = image.getexif() if late else Image.Image.getexif(image)
        on_its_side = exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        if not ended:
            image.load()
        return (width, height) if on_its_side else (height, width)


def grid(source: str, root: Path | str, pixels: Pixels) -> tuple[int, int]:
    """Give the rows and columns of patches of a picture, from its header.

    Raises:
        ValueError: as `size_of` and `resize`; names the picture.
    """
    height, width = size_of(source, root)
    try:
        high, wide = resize(height, width, pixels)
    except ValueError as error:
        raise ValueError(f"{brief(source)}: {error}") from error
    return high // pixels.patch, wide // pixels.patch


def open_image(source: str, root: Path | str) -> Image.Image:
    """Decode a picture: upright, in red, green and blue; the first one of an animation.

    What is transparent becomes white, as in the image processors of transformers. Of 16 bits the
    upper 8 are kept.

    Raises:
        ValueError: it cannot be found or decoded (missing, empty, cut short, not a picture, too
            many pixels); names it and says why.
    """
    with _opened(source, root) as image:
        image.load()
        turn = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
        return _rgb(image if turn is None else image.transpose(turn))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its values of mode {image.mode!r} have no known range")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def patches(
    image: Image.Image, pixels: Pixels
) -> tuple[Float[np.ndarray, "patches patch_dim"], tuple[int, int, int]]:
    """Give the normalised patches of an RGB picture, float32, and its grid: time, rows, columns.

    Patches are in merge-block order, the values of each in the order channel, time, row, column.

    Raises:
        ValueError: as `resize`, or the picture is not RGB.
    """
    if image.mode != "RGB":
        raise ValueError(f"the picture has mode {image.mode!r}, needs 'RGB'")
    height, width = resize(image.height, image.width, pixels)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    std = np.array(pixels.std)
    values = np.asarray(resized, dtype=np.float32) * (1 / (255 * std)).astype(np.float32)
    values -= (np.array(pixels.mean) / std).astype(np.float32)
    blocks = rearrange(
        values,
        "(h y p) (w x q) c -> (h w y x) c p q",
        p=pixels.patch,
        q=pixels.patch,
        y=pixels.merge,
        x=pixels.merge,
    )
    flat = repeat(blocks, "n c p q -> n (c t p q)", t=pixels.temporal)
    return flat, (1, height // pixels.patch, width // pixels.patch)


def brief(source: str) -> str:
    """Write a source for a message: paths whole, data URLs by their beginning."""
    if len(source) <= 200:
        return repr(source)
    return f"{source[:40]!r}... ({len(source)} characters)"


@contextmanager
def _opened(source: str, root: Path | str) -> Iterator[Image.Image]:
    """Open a picture, and name it in whatever goes wrong while it is read."""
    name = brief(source)
    content = _data(source) if source[:5].lower() == "data:" else locate(source, root)
    empty = not content.getvalue() if isinstance(content, io.BytesIO) else _is_empty(content)
    if empty:
        raise ValueError(f"{name} is empty")
    try:
        with Image.open(content, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not a picture ({', '.join(FORMATS)})") from error
    except MemoryError:  # A matter of the machine, not of the file.
        raise
    except Exception as error:  # On broken bytes a decoder may raise anything.
        raise ValueError(f"{name} cannot be read: {error}") from error


def _is_empty(path: Path) -> bool:
    return path.stat().st_size == 0


def _data(url: str) -> io.BytesIO:
    """Decode a data URL of a picture.

    Raises:
        ValueError: it is of another type, or not in base64.
    """
    head, comma, body = url.partition(",")
    words = head[5:].lower().split(";")
    if not comma or not words[0].startswith("image/") or words[-1] != "base64":
        raise ValueError(f"{brief(url)} does not begin with 'data:image/...;base64,'")
    try:
        return io.BytesIO(base64.b64decode("".join(body.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{brief(url)} is not in base64: {error}") from error


def _last_bytes(file: io.BufferedIOBase) -> bytes:
    """Read the last of a file, with room for a few bytes that do not belong to the picture."""
    place = file.tell()
    file.seek(-min(64, file.seek(0, io.SEEK_END)), io.SEEK_END)
    last = file.read()
    file.seek(place)
    return last


def _late_notes(file: io.BufferedIOBase) -> bool:
    """Tell whether a PNG has chunks after its pixels that may hold an orientation."""
    place = file.tell()
    file.seek(8)
    pixels = late = False
    while not late and len(head := file.read(8)) == 8:
        kind = head[4:]
        pixels = pixels or kind == b"IDAT"
        late = pixels and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
        file.seek(int.from_bytes(head[:4], "big") + 4, io.SEEK_CUR)
    file.seek(place)
    return late
