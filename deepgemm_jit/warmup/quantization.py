"""How a config says that weights are kept, and the refusal of what no kernel reads: the same for every reader of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup.config import ConfigKeys
from deepgemm_jit.warmup.models import SCALE_BLOCK

SERVED = (
    "quant_method fp8, fmt e4m3, weight_block_size [128, 128], [1, 128] or null, activation_scheme dynamic or static, "
    "expert_dtype fp8 or fp4; or experts in bfloat16"
)
_OTHER_BLOCKS = (
    'transformers runs other blocks with experts_implementation="grouped_mm", or "eager" where activations are static; '
    "or quantize the weights anew"
)


def read_quantization(keys: ConfigKeys) -> Mapping[str, Any] | None:
    """Return the quantization, which the kernels serve if there is no fault; None when there is none.

    Raises:
        UnsupportedError: a key holds a scheme that is not known.
    """
    quantization = keys.config.get("quantization_config")
    _known(keys, "expert_dtype", keys.config.get("expert_dtype"), ("fp8", "fp4", None), section="")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        keys.wrong("quantization_config", quantization, "an object")
        return {}
    # Nothing else of a scheme means anything when its method is another one.
    if "quant_method" in quantization:
        _known(keys, "quant_method", quantization["quant_method"], ("fp8",))
    for key in ("quant_method", "activation_scheme", "weight_block_size"):
        if key not in quantization:
            keys.faults.append(f"key quantization_config.{key} is missing")
    for key, known in (
        ("fmt", ("e4m3",)),
        ("activation_scheme", ("dynamic", "static")),
        ("scale_fmt", ("ue8m0", "float", "float32", None)),
        ("expert_dtype", ("fp8", "fp4", None)),
    ):
        if key in quantization:
            _known(keys, key, quantization[key], known)
    block = quantization.get("weight_block_size")
    # Compared by type too, as 128.0 and True equal whole numbers.
    if block is None or (isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)):
        blocks = ([SCALE_BLOCK, SCALE_BLOCK], [1, SCALE_BLOCK], None)
        _known(keys, "weight_block_size", block, blocks, advice=_OTHER_BLOCKS)
    else:
        keys.wrong("quantization_config.weight_block_size", block, "a list of two whole numbers, or null")
    return quantization


def require_bf16(keys: ConfigKeys, key: str) -> None:
    """Refuse a model's own dtype if experts in it have no kernels.

    Raises:
        UnsupportedError: it is not bfloat16.
    """
    _known(keys, key, keys.config[key], ("bfloat16",), section="")


def _known(
    keys: ConfigKeys,
    key: str,
    value: object,
    known: tuple[object, ...],
    section: str = "quantization_config.",
    advice: str = "",
) -> None:
    if value not in known:
        raise UnsupportedError(given=f"{section}{key} = {shown(value)} in {keys.file}", supported=SERVED, advice=advice)
