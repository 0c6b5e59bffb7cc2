"""What the documentation shows runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    """Give the Python of a page, block by block."""
    return re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )


def test_the_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """All of its blocks, in order, as one program."""
    names: dict[str, object] = {}
    found = blocks("docs/tutorial.md")
    assert len(found) >= 8
    for block in found:
        exec(compile(block, "docs/tutorial.md", "exec"), names)
    assert "text.layers.*.attention.q" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    """Files of this checkout that a page links to exist."""
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_pages_name_files_that_exist() -> None:
    """A module or script named in a page is in the tree."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(
            r"`((?:mmfn|models|sharding|recipes|tests|docs)/[\w/.]+)`", page.read_text("utf-8")
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
