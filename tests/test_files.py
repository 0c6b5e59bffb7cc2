"""Files that are complete or absent."""

from pathlib import Path

import pytest

from mmfn import files


def test_json_is_the_old_or_the_new_and_gives_back_what_was_written(tmp_path: Path) -> None:
    """Refused before the file is touched: what JSON would give back as another value."""
    path = tmp_path / "config.json"
    value = {"rate": 1e-5, "names": ["ä"], "steps": 2**60, "none": None, "on": True}
    files.write_json(path, value)
    assert files.read_json(path) == value
    for bad, message in [
        ({"a": {"b": [0.5, float("inf")]}}, r"config\.json\.a\.b\.1 is inf"),
        ({"a": {3: "x"}}, r"config\.json\.a has the key 3, which is not a string"),
        ({"a": Path("x")}, r"config\.json\.a is a PosixPath, which JSON cannot hold"),
    ]:
        with pytest.raises(ValueError, match=message):
            files.write_json(path, bad)
    assert files.read_json(path) == value
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json holds a JSON list, not an object"):
        files.read_json(path)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """An error on the way leaves nothing behind; what is there already stays."""
    with files.new_folder(tmp_path / "a" / "b") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "x").read_text() == "1"
    with pytest.raises(FileNotFoundError), files.new_folder(tmp_path / "c") as folder:
        (folder / "no" / "x").write_text("1")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with (
        pytest.raises(ValueError, match="b exists and is not an empty folder"),
        files.new_folder(tmp_path / "a" / "b"),
    ):
        pytest.fail("entered")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "../a"])
def test_a_path_is_no_plain_name(name: str) -> None:
    """Only names of files in the folder itself are."""
    assert not files.plain_name(name)
    assert files.plain_name("model-00001-of-00002.safetensors")
