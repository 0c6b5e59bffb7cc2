"""Train multimodal models as pure functions.

Names are loaded when first used, and nothing here imports torch: where `torch_npu` is installed
without CANN, `import torch` fails before anything could help.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmfn.batch import Batch as Batch
    from mmfn.param import Param as Param
    from mmfn.param import init as init
    from mmfn.transforms import value_and_grad as value_and_grad
    from mmfn.weights import load as load
    from mmfn.weights_export import export as export

__version__ = "0.1.0"

_HOME = {
    "Batch": "mmfn.batch",
    "Param": "mmfn.param",
    "init": "mmfn.param",
    "value_and_grad": "mmfn.transforms",
    "export": "mmfn.weights_export",
    "load": "mmfn.weights",
}

__all__ = ["Batch", "Param", "__version__", "export", "init", "load", "value_and_grad"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'mmfn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
