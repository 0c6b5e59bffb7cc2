"""Sizes of the published Qwen3-VL models.

Source: the config files of the Qwen3-VL-Instruct models of these names.
"""

from collections.abc import Mapping

import attrs

from mmfn.models import moe, vision
from mmfn.models.qwen3_vl import Config

_SMALL_TOWER = vision.Config()
_LARGE_TOWER = vision.Config(layers=27, embed=1152, mlp=4304, out=4096, deepstack=(8, 16, 24))

PRESETS: Mapping[str, Config] = {
    "2B": Config(151936, 2048, 28, 16, 8, 6144, _SMALL_TOWER, tied=True),
    "4B": Config(151936, 2560, 36, 32, 8, 9728, attrs.evolve(_SMALL_TOWER, out=2560), tied=True),
    "8B": Config(151936, 4096, 36, 32, 8, 12288, _LARGE_TOWER),
    "32B": Config(151936, 5120, 64, 64, 8, 25600, attrs.evolve(_LARGE_TOWER, out=5120)),
    "30B-A3B": Config(
        151936,
        2048,
        48,
        32,
        4,
        6144,
        attrs.evolve(_LARGE_TOWER, out=2048),
        experts=moe.Config(128, 8, 768),
    ),
    "235B-A22B": Config(
        151936, 4096, 94, 64, 4, 12288, _LARGE_TOWER, experts=moe.Config(128, 8, 1536)
    ),
}
