"""What differs between cpu, cuda and npu, in one place; an accelerator's plug-in is imported only
when it is asked for."""

import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Callable

import attrs
import torch

from mmfn import memory
from mmfn import ops as op


@attrs.frozen
class Device:
    """What a device offers."""

    name: str
    """`cpu`, `cuda` or `npu`."""
    ops: op.Ops
    """Its fused operations."""
    adamw: Callable[..., None]
    """Its fused AdamW, for `optim.adamw`."""
    memory: Callable[[], int]
    """Bytes in use: resident memory of the process on the CPU, allocated memory elsewhere."""
    prepare: Callable[[], object]
    """Sets what the process needs to work well on it; whoever runs a job calls it once."""
    model: str
    """What the maker calls it, as torch tells; `cpu` for any CPU."""

    backend: str = "gloo"
    """What its ranks talk by, as torch.distributed names it; tensors on the host go by gloo."""

    @property
    def torch(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.name)


def resolve(name: str) -> Device:
    """Give the device called `cpu`, `cuda` or `npu`, or the best that is there for `auto`.

    `auto` never means an NPU: its plug-in is imported only when asked for by name.

    Raises:
        ValueError: there is no such device here; says what was found.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    match name:
        case "cpu":
            from mmfn.kernels import cpu

            return Device(name, cpu.OPS, cpu.adamw_, resident_bytes, memory.keep_freed, name)
        case "cuda":
            if not torch.cuda.is_available():
                raise ValueError(
                    f"device 'cuda' was asked for, but torch {torch.__version__} has none"
                )
            from mmfn.kernels import cuda

            model = torch.cuda.get_device_name()
            return Device(
                name,
                cuda.OPS,
                cuda.adamw_,
                torch.cuda.memory_allocated,
                _own_gpu,
                model,
                "cpu:gloo,cuda:nccl",
            )
        case "npu":
            raise ValueError(_npu_problem())
        case _:
            raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, npu")


def _own_gpu() -> None:
    """Take the GPU of this rank on its machine, as torchrun numbers them."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _npu_problem() -> str:
    """Say why there is no NPU. A plug-in that is there but broken raises its own error."""
    if importlib.util.find_spec("torch_npu") is None:
        return (
            "device 'npu' was asked for, but torch_npu is not installed; it is the extra mmfn[npu]"
        )
    plugin = importlib.import_module("torch_npu")
    version = getattr(plugin, "__version__", "?")
    return (
        f"device 'npu' was asked for; torch_npu {version} is here, but mmfn has no kernels for it"
    )


def resident_bytes() -> int:
    """Give the resident memory of this process, in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        # Elsewhere only the peak is known: in kilobytes, on macOS in bytes.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
