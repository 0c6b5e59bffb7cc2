"""Devices are chosen once, by name; an accelerator's plug-in is imported only when asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmfn import device, memory


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose path has a folder before all others."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"],
        capture_output=True,
        text=True,
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""},
    )


def test_the_cpu_is_there_and_auto_finds_it() -> None:
    """With its kernels, and memory in use that grows with what is held."""
    found = device.resolve("auto" if not torch.cuda.is_available() else "cpu")
    assert found.name == "cpu"
    assert found.torch == torch.device("cpu")
    before = found.memory()
    held = torch.ones(50_000_000)
    assert found.memory() - before > 150e6
    assert memory.peak_bytes() >= before
    del held


@pytest.mark.parametrize("name", ["cuda", "npu", "tpu"])
def test_a_device_that_is_not_there_is_refused_by_name(name: str) -> None:
    """Never taken for the CPU."""
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=name):
        device.resolve(name)


def test_a_broken_plug_in_is_heard_and_only_when_asked_for(tmp_path: Path) -> None:
    """A `torch_npu` that raises: its own error is shown for npu, and the CPU does not import it."""
    (tmp_path / "torch_npu.py").write_text("raise RuntimeError('broken driver')")
    asked = run("from mmfn import device; device.resolve('npu')", tmp_path)
    assert asked.returncode != 0
    assert "RuntimeError: broken driver" in asked.stderr
    other = run("from mmfn import device; print(device.resolve('auto').name)", tmp_path)
    assert other.stdout.strip() == "cpu"


def test_freed_memory_is_kept_for_the_next_step() -> None:
    """A large block that was freed stays with the process."""
    code = (
        "import torch; from mmfn import memory, device; print(memory.keep_freed()); "
        "x = torch.ones(50_000_000); full = device.resident_bytes(); del x; "
        "print(full - device.resident_bytes() < 50e6)"
    )
    found = run(code, Path())
    if found.stdout.startswith("True"):
        assert found.stdout.split() == ["True", "True"]
