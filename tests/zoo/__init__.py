"""A catalogue of small models as people bring them: ``ZOO[name](dtype, seed)`` is a Case with a batch of 8.

Weights and data are drawn from the seed and are the same in every dtype; nothing is random in forward.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.models import Case
from tests.zoo.decoders import DECODERS
from tests.zoo.encoders import ENCODERS
from tests.zoo.kinds import KINDS_OF_FORM
from tests.zoo.kinds_of_code import KINDS_OF_CODE
from tests.zoo.plain import PLAIN
from tests.zoo.variants import VARIANTS
from tests.zoo.vision import VISION

ZOO: dict[str, Callable[..., Case]] = {
    **DECODERS,
    **ENCODERS,
    **VISION,
    **PLAIN,
    **KINDS_OF_FORM,
    **KINDS_OF_CODE,
    **VARIANTS,
}
# Their operators know no float64, or they choose single precision themselves.
SINGLE_PRECISION = frozenset({"mixtral_grouped", "qwen3_moe", "autocast"})
