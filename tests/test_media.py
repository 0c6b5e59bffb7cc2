"""Pictures become the patches that transformers makes of them, or are refused by name."""

import base64
import io
import json
import os
import socket
import struct
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from mmfn.data import formats, media
from mmfn.data.media import Pixels

CASES = Path(__file__).parent / "data" / "cases"
HALF = (0.5, 0.5, 0.5)
PUBLISHED = Pixels(16, 2, 2, 65_536, 16_777_216, HALF, HALF)
"""As in the folders of the published models."""


def budget(low: int, high: int, **changes: Any) -> Pixels:
    """The published settings with another budget."""
    return attrs.evolve(PUBLISHED, min_pixels=low, max_pixels=high, **changes)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture of random values."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a picture in a file of this kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(content: bytes, kind: str = "png") -> str:
    """A data URL of these bytes."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("size", "pixels", "expected"),
    [
        ((100, 20_000), budget(1024, 20_480), (32, 2016)),
        ((17, 3400), budget(1024, 20_480), (32, 2016)),
        ((31, 639), budget(1024, 20_480), (32, 640)),
        ((31, 639), budget(3136, 15_680, patch=14), (28, 560)),
        ((20, 4000), PUBLISHED, (32, 4000)),
        ((1080, 1920), PUBLISHED, (1088, 1920)),
        ((400, 432), PUBLISHED, (384, 448)),
        ((432, 400), PUBLISHED, (448, 384)),
        ((224, 224), PUBLISHED, (256, 256)),
        ((250, 251), PUBLISHED, (256, 256)),
        ((480, 640), PUBLISHED, (480, 640)),
        ((3024, 4032), PUBLISHED, (3008, 4032)),
        ((6000, 9000), PUBLISHED, (3328, 4992)),
        ((8, 1600), PUBLISHED, (32, 3648)),
        ((80, 112), budget(1024, 20_480), (64, 128)),
        ((48, 80), budget(1024, 20_480), (64, 64)),
        ((16, 16), budget(1024, 20_480), (32, 32)),
    ],
)
def test_sides_are_multiples_of_a_block_within_the_budget(
    size: tuple[int, int], pixels: Pixels, expected: tuple[int, int]
) -> None:
    """Halves go to even; no side is ever below one block."""
    assert media.resize(*size, pixels) == expected


@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([14, 16]),
    st.integers(1, 10**6),
    st.integers(1024, 10**8),
)
def test_resize_agrees_with_transformers(
    height: int, width: int, patch: int, low: int, high: int
) -> None:
    """For any size and budget that it takes."""
    assume(max(height, width) <= 200 * min(height, width))
    pixels = budget(min(low, high), high, patch=patch)
    theirs = smart_resize(height, width, patch * 2, pixels.min_pixels, pixels.max_pixels)
    assert media.resize(height, width, pixels) == theirs


def test_too_thin_pictures_are_refused_by_name() -> None:
    """A ratio of exactly 200 passes above."""
    with pytest.raises(ValueError, match=r"4001x20 has an aspect ratio of 200.05, above 200"):
        media.resize(20, 4001, PUBLISHED)
    with pytest.raises(ValueError, match=r"'ratio200.png': 2001x10 .* 200.10"):
        media.grid("ratio200.png", CASES, PUBLISHED)
    with pytest.raises(ValueError, match="0x5 has no pixels"):
        media.resize(5, 0, PUBLISHED)


@pytest.mark.parametrize("size", [(64, 64), (432, 400), (31, 639), (97, 50)])
@pytest.mark.parametrize("colours", [(HALF, HALF), ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))])
def test_patches_agree_with_transformers(size: tuple[int, int], colours: Any) -> None:
    """Reduced and enlarged; the scale and the shift are folded in float32 here."""
    pixels = budget(8192, 65_536, mean=colours[0], std=colours[1])
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 8192, "longest_edge": 65_536},
        patch_size=16,
        image_mean=list(colours[0]),
        image_std=list(colours[1]),
    )
    image = noise(*size)
    theirs = processor(images=[image], return_tensors="np")
    ours, grid = media.patches(image, pixels)
    assert grid == tuple(theirs["image_grid_thw"][0])
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs["pixel_values"], rtol=0, atol=1e-6)


MODES = ["RGB", "L", "1", "P", "LA", "RGBA", "CMYK", "YCbCr"]


@pytest.mark.parametrize("name", [*MODES, "cmyk.jpg", "gray.png", "anim.gif"])
def test_colours_agree_with_transformers(name: str) -> None:
    """What is transparent becomes white; of an animation the first picture is read."""
    if name in MODES:
        kind = "tiff" if name in ("CMYK", "YCbCr") else "png"
        content = saved(noise(64, 64, name) if "A" in name else noise(64, 64).convert(name), kind)
    else:
        content, kind = (CASES / name).read_bytes(), name[-3:]
    ours = media.open_image(url(content, kind), CASES)
    with Image.open(io.BytesIO(content)) as stored:
        theirs = convert_to_rgb(stored, return_numpy=True)
    assert ours.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_transparent_pixels_become_white() -> None:
    """In a palette with one transparent entry."""
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    content = saved(palette, "png", transparency=0)
    rgb = media.open_image(url(content), CASES)
    assert [rgb.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


def test_of_sixteen_bits_the_upper_eight_are_kept() -> None:
    """Float values have no known range and are refused."""
    values = np.array([[0, 255, 256, 40_000, 65_535]], dtype=np.uint16)
    for kind in ("png", "tiff"):
        rgb = media.open_image(url(saved(Image.fromarray(values), kind), kind), CASES)
        np.testing.assert_array_equal(np.asarray(rgb)[..., 0], [[0, 0, 1, 156, 255]])
    wide = saved(Image.fromarray(values.astype(np.float32)), "tiff")
    with pytest.raises(ValueError, match=r"cannot be read: .* mode 'F' have no known range"):
        media.open_image(url(wide, "tiff"), CASES)


def test_a_picture_is_turned_upright_before_anything_else() -> None:
    """From a file and from a data URL alike."""
    assert media.size_of("exif6.jpg", CASES) == (96, 48)
    assert media.grid("exif6.jpg", CASES, PUBLISHED) == (24, 12)
    for source in ("exif6.jpg", url((CASES / "exif6.jpg").read_bytes(), "jpeg")):
        image = media.open_image(source, CASES)
        assert image.size == (48, 96)
        top, bottom = image.getpixel((0, 0)), image.getpixel((0, 95))
        assert np.abs(np.array([top, bottom]) - [[254, 0, 0], [0, 0, 254]]).max() <= 2


def late_exif(content: bytes) -> bytes:
    """Move the orientation of a PNG behind its pixels."""
    start = content.index(b"eXIf") - 4
    size = int.from_bytes(content[start : start + 4], "big") + 12
    chunk = content[start : start + size]
    rest = content[:start] + content[start + size :]
    end = rest.index(b"IEND") - 4
    return rest[:end] + chunk + rest[end:]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "late png", "webp", "tiff"])
def test_each_orientation_is_turned_and_the_header_gives_its_size(
    kind: str, orientation: int
) -> None:
    """Also where a PNG has its orientation behind the pixels."""
    exif = Image.Exif()
    exif[0x112] = orientation
    content = saved(noise(48, 32), kind.split()[-1], exif=exif)
    content = late_exif(content) if kind == "late png" else content
    source = url(content, kind.split()[-1])
    image = media.open_image(source, CASES)
    with Image.open(io.BytesIO(content)) as stored:
        stored.load()
        np.testing.assert_array_equal(np.asarray(image), ImageOps.exif_transpose(stored))
    assert image.size == ((32, 48) if orientation > 4 else (48, 32))
    assert media.size_of(source, CASES) == (image.height, image.width)


def hollow(width: int, height: int) -> str:
    """A PNG that ends where its pixels should begin."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in ((b"IHDR", head), (b"IDAT", b""), (b"IEND", b""))
    )
    return url(b"\x89PNG\r\n\x1a\n" + chunks)


def test_sizes_are_read_without_decoding() -> None:
    """There is nothing in the file to decode."""
    assert media.size_of(hollow(12_000, 7000), CASES) == (7000, 12_000)
    with pytest.raises(ValueError, match=r"data:image/png.* cannot be read: "):
        media.open_image(hollow(12_000, 7000), CASES)


def test_a_file_that_unpacks_to_too_much_is_refused() -> None:
    """By its header, whose claim is 10 000 megapixels in a few bytes."""
    with pytest.raises(ValueError, match=r"cannot be read: .*10000000000 pixels"):
        media.size_of(hollow(100_000, 100_000), CASES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated.jpg", "'truncated.jpg' cannot be read: image file is truncated"),
        ("not_image.jpg", "'not_image.jpg' is not a picture"),
        ("empty.jpg", "'empty.jpg' is empty"),
        ("missing_file.png", "'missing_file.png' is missing in the media root"),
        (".", "'.' is not a file"),
        ("", "'' is not a file"),
        ("a\0.png", "is no path in the media root .*null"),
        ("x" * 300, r"x'\.\.\. \(300 characters\) is no path in the media root"),
    ],
)
def test_a_file_that_is_no_picture_is_refused_by_name_and_cause(name: str, message: str) -> None:
    """A source too long for a message is cut short in it."""
    with pytest.raises(ValueError, match=message):
        media.open_image(name, CASES)


def test_no_outside_program_reads_a_picture() -> None:
    """Postscript would be handed to an interpreter."""
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    with pytest.raises(ValueError, match="is not a picture"):
        media.open_image(url(content, "eps"), CASES)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:text/html;base64,AAAA", "does not begin with 'data:image/...;base64,'"),
        ("data:image/png,AAAA", "does not begin with"),
        ("data:image/png;base64", "does not begin with"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,A*AA", "is not in base64"),
        ("data:image/png;base64,AAAA", "is not a picture"),
        ("data:image/png;base64," + "A" * 400, r"\.\.\. \(422 characters\) is not a picture"),
    ],
)
def test_a_data_url_that_is_no_picture_is_refused(source: str, message: str) -> None:
    """Of another type, not in base64, empty, or of other bytes."""
    with pytest.raises(ValueError, match=message):
        media.size_of(source, CASES)


def test_paths_stay_in_the_media_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected to; a link may point anywhere inside, and nowhere outside."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for sample in formats.read(CASES / "z02_paths.json"):
        source = sample.images[0].source
        if sample.name == "6":
            assert media.size_of(source, CASES) == (64, 64)
            continue
        cause = "is an address" if ":" in source else "lies outside the media root"
        with pytest.raises(ValueError, match=cause) as caught:
            media.open_image(source, CASES)
        assert repr(source) in str(caught.value)

    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a.png").write_bytes((CASES / "a64.png").read_bytes())
    (tmp_path / "secret.png").write_bytes((CASES / "a64.png").read_bytes())
    (tmp_path / "rooted").mkdir()
    (root / "inside.png").symlink_to("a.png")
    (root / "outside.png").symlink_to("../secret.png")
    (root / "folder").symlink_to("..")
    (root / "circle.png").symlink_to("circle.png")
    os.mkfifo(root / "pipe.png")
    (tmp_path / "link").symlink_to("root")
    good = ["a.png", "./sub/../a.png", "inside.png", str(root / "a.png"), "../root/a.png"]
    for source in good:
        assert media.locate(source, root) == media.locate(source, tmp_path / "link")
    for source, message in {
        "outside.png": "'outside.png' lies outside",
        "folder/secret.png": "lies outside",
        "../rooted/a.png": "lies outside",
        "circle.png": "'circle.png' is no path in",
        "pipe.png": "'pipe.png' is not a file",
        "FILE:///etc/hostname": "is an address",
        "s3://bucket/a.png": "is an address",
        " http://127.0.0.1/a.png": "is an address",
    }.items():
        with pytest.raises(ValueError, match=message):
            media.locate(source, root)


SETTINGS = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VISION = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}


def write(folder: Path, settings: Any, vision: Any = VISION) -> None:
    """Write the settings of a published folder."""
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vision_config": vision}))


def test_pixels_are_read_from_a_folder_in_each_of_its_spellings(tmp_path: Path) -> None:
    """Where both are there, `max_pixels` wins, as in transformers."""
    write(tmp_path, SETTINGS)
    assert media.pixels_of(tmp_path) == PUBLISHED
    old = {k: v for k, v in SETTINGS.items() if k != "size"}
    write(tmp_path, {**old, "min_pixels": 65_536, "max_pixels": 16_777_216})
    assert media.pixels_of(tmp_path) == PUBLISHED
    write(tmp_path, {**SETTINGS, "max_pixels": 65_536})
    assert media.pixels_of(tmp_path) == budget(65_536, 65_536)
    assert (
        Qwen2VLImageProcessorPil(**deepcopy(SETTINGS), max_pixels=65_536).size.longest_edge
        == 65_536
    )
    (tmp_path / "preprocessor_config.json").unlink()
    nested = {"image_processor": SETTINGS, "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert media.pixels_of(tmp_path) == PUBLISHED


def test_pixels_that_transformers_saves_are_read(tmp_path: Path) -> None:
    """In the form of the installed version."""
    Qwen2VLImageProcessorPil(**deepcopy(SETTINGS)).save_pretrained(tmp_path)
    assert media.pixels_of(tmp_path) == PUBLISHED


@pytest.mark.parametrize(
    ("changes", "vision", "message"),
    [
        ({"patch_size": 14}, VISION, "patch_size=14, but .*vision_config.patch_size=16"),
        ({}, VISION | {"spatial_merge_size": 1}, "merge_size=2, but .*spatial_merge_size=1"),
        ({"patch_size": None}, VISION, "preprocessor_config.json has patch_size=None"),
        ({"size": {"height": 224}}, VISION, "min_pixels=None, needs a whole number"),
        ({"image_mean": 0.5}, VISION, "image_mean=0.5, needs three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, VISION, r"std=\(0.5, 0.5, 0.0\), needs values above 0"),
        ({"max_pixels": 1000}, VISION, "max_pixels=1000 is less than min_pixels=65536"),
        ({"do_resize": False}, VISION, "do_resize=False, needs True"),
        ({"resample": 2}, VISION, "resample=2, needs 3"),
    ],
)
def test_a_folder_that_asks_for_something_else_is_refused(
    tmp_path: Path, changes: Any, vision: Any, message: str
) -> None:
    """By the file, the key and both values."""
    write(tmp_path, {**SETTINGS, **changes}, vision)
    with pytest.raises(ValueError, match=message):
        media.pixels_of(tmp_path)


def test_a_budget_below_one_block_is_refused() -> None:
    """And so are sizes below one, and pictures that are not RGB."""
    with pytest.raises(ValueError, match=r"max_pixels=1000 is less than .* one block of 32x32"):
        budget(1, 1000)
    with pytest.raises(ValueError, match="merge=0, needs at least 1"):
        attrs.evolve(PUBLISHED, merge=0)
    with pytest.raises(ValueError, match="mode 'L', needs 'RGB'"):
        media.patches(Image.new("L", (64, 64)), PUBLISHED)
