"""How much of a device's peak a step uses: the peaks, as published or measured."""

import time
from collections.abc import Callable, Mapping

import torch

PEAKS: Mapping[str, float] = {
    # NVIDIA A100 datasheet, 2021: 312 TFLOP/s dense, SXM and PCIe alike.
    "A100": 312e12,
    # NVIDIA H100 architecture white paper, table 2: dense, SXM5 and PCIe.
    "H100 80GB HBM3": 989.4e12,
    "H100 PCIe": 756e12,
    # NVIDIA H200 datasheet: 1,979 (SXM) and 1,671 (NVL) TFLOP/s with sparsity, which doubles them.
    "H200": 989.5e12,
    "H200 NVL": 835.5e12,
    # Zuo et al. 2025, arXiv:2506.12708, section 3: 752 TFLOP/s a package of two dies; a device of
    # torch_npu is one die.
    "Ascend910_93": 376e12,
}
"""FLOP/s of products of bfloat16 or float16, without sparsity, by a part of the device's name."""

SIDE = 1024
"""Side of the matrices of `gemm_rate`."""


def gemm_rate(
    dtype: torch.dtype,
    seconds: int | float = 0.3,
    *,
    clock: Callable[[], int | float] = time.perf_counter,
) -> float:
    """Measure the FLOP/s of matrix products on the CPU: the best of those made in that time.

    It stands for a peak where none is published; other shapes may be somewhat faster.
    """
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).to(dtype)
    torch.mm(x, x)  # The first product of a kind also sets up its kernel.
    best, end = float("inf"), clock() + seconds
    while True:
        start = clock()
        torch.mm(x, x)
        now = clock()
        best = min(best, now - start)
        if now >= end:
            return 2 * SIDE**3 / best


def peak(name: str, dtype: torch.dtype, override: int | float | None = None) -> float | None:
    """Give the peak FLOP/s of a device, or `override`; None where no peak is published.

    The name is one that torch gives a device, or `cpu`, whose rate is measured. Published are the
    rates of bfloat16 and float16 on those of `PEAKS`.

    Raises:
        ValueError: `override` is not positive.
    """
    if override is not None:
        if not override > 0:
            raise ValueError(f"the peak was given as {override} FLOP/s, which is not positive")
        return float(override)
    if name == "cpu":
        return gemm_rate(dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    matches = [part for part in PEAKS if part in name]
    return PEAKS[max(matches, key=len)] if matches else None


def utilisation(flops: int | float, step_s: int | float, peak: int | float | None) -> float | None:
    """Give the share of the peak that a step used; None where no peak is known.

    `flops` are those of the model: what is computed twice, or for padding, does not count.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    return None if peak is None else flops / step_s / peak
