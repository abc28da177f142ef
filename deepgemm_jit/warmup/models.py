"""A model's config.json: the sizes of its experts, how their weights are kept, and what of the model no kernel is planned for.

Only files are read here: no checkpoint, no torch, no transformers. The experts of all layers of a model have one size, so one
layer stands for all. Key names are those of the published configs (Qwen, DeepSeek, GLM, Mixtral, MiniMax, Llama 4).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup.config import config_file, read_config, refused_config

SCALE_BLOCK = 128
"""Rows and columns of a weight that share one scale."""
SIZE_LIMIT = 2**31
COUNT_NEEDED = f"a whole number from 1 to {SIZE_LIMIT - 1}"

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_DTYPES = ("dtype", "torch_dtype")
_SERVED = (
    "quant_method fp8, fmt e4m3, weight_block_size [128, 128], [1, 128] or null, activation_scheme dynamic or static, "
    "expert_dtype fp8 or fp4; or experts in bfloat16"
)
_WHOLE_SET = "not read from the config yet; a warm-up without --model builds the whole kernel set, which serves all FP8 linears"
_PLAIN = "kept in the model's own dtype and multiplied by the framework"
_N_MAJOR = "which way they lie is not in the config; a warm-up without --model builds their kernels too"


class Scheme(Enum):
    """How the weights of experts are kept; the value is for messages."""

    BLOCKS = "FP8 with a scale per 128 x 128 block"
    ROWS = "FP8 with a scale per row and 128 columns"
    TENSOR = "FP8 with a scale per tensor"
    FP4 = "FP4 with a scale per row and 32 columns"
    BF16 = "bfloat16"

    @property
    def width_step(self) -> int:
        """What the width of an expert's shard must be a multiple of.

        A shard that begins inside of a block of scales would need that block's scale for a part of a block of its own, which
        the scales of a checkpoint cannot express. Without blocks it is the 16 bytes of the copy engine.
        """
        return {Scheme.BLOCKS: SCALE_BLOCK, Scheme.ROWS: SCALE_BLOCK, Scheme.TENSOR: 16, Scheme.FP4: 32, Scheme.BF16: 8}[self]


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A part of a model that a plan holds no kernels for, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know of a model.

    Attributes:
        path: the config that was read.
        hidden_size: columns of the activations.
        intermediate_size: width of one expert, and ``intermediate_key`` the key that holds it.
        experts: routed experts of a layer, and ``experts_key`` the key that holds them.
        experts_per_token: experts that a token visits.
        scheme: how the weights of the experts are kept.
        uncovered: the parts without a plan.
    """

    path: Path
    hidden_size: int
    intermediate_size: int
    intermediate_key: str
    experts: int
    experts_key: str
    experts_per_token: int
    scheme: Scheme
    uncovered: tuple[Uncovered, ...]


def read_model(path: str | os.PathLike[str]) -> Model:
    """Read the config of a model.

    Args:
        path: a config.json or the folder that holds one.

    Raises:
        OperandError: the file cannot be read, is no JSON object, or lacks a key or holds a meaningless value; all such keys are
            named at once.
        UnsupportedError: the weights are kept in a way that no kernel serves.
    """
    file = config_file(path)
    return _Reader(file, read_config(file)).model()


class _Reader:
    """One pass over a config, which collects its faults so that a user sees them all at once."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self.file = file
        self.faults: list[str] = []
        # Configs of models that also see or hear keep the language model's keys in text_config.
        text = config.get("text_config")
        self.config: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
        if not isinstance(text, dict | None):
            self.wrong("text_config", text, "an object")

    def model(self) -> Model:
        hidden_size = self.size("hidden_size")
        experts_key = self.experts_key()
        experts = self.size(experts_key) if experts_key else 0
        # intermediate_size is the experts' width in the Mixtral family, which counts num_local_experts; elsewhere it is the
        # dense MLP's, and taking it for a missing moe_intermediate_size would plan the wrong kernels.
        is_mixtral = experts_key == "num_local_experts" and "moe_intermediate_size" not in self.config
        intermediate_key = "intermediate_size" if is_mixtral else "moe_intermediate_size"
        intermediate_size = self.size(intermediate_key)
        experts_per_token = self.size("num_experts_per_tok")
        if experts and experts_per_token > experts:
            self.faults.append(f"num_experts_per_tok = {experts_per_token} is more than {experts_key} = {experts}")
        quantization = self.quantization()
        scheme = self.scheme(quantization)
        uncovered = self.outside_experts(_PLAIN if quantization is None else _WHOLE_SET)
        if scheme is Scheme.BF16:
            uncovered.append(Uncovered("experts that lie N-major, (E, K, N)", _N_MAJOR))
        if self.faults:
            raise refused_config(self.file, *self.faults)
        return Model(
            path=self.file,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            intermediate_key=intermediate_key,
            experts=experts,
            experts_key=experts_key,
            experts_per_token=experts_per_token,
            scheme=scheme,
            uncovered=tuple(uncovered),
        )

    def wrong(self, key: str, value: object, needed: str) -> None:
        self.faults.append(f"{key} = {shown(value)}, needed: {needed}")

    def size(self, key: str) -> int:
        """Return a whole number of at least 1; note a fault and return 0 when there is none."""
        value = self.config.get(key)
        if type(value) is int and 0 < value < SIZE_LIMIT:
            return value
        if key in self.config:
            self.wrong(key, value, COUNT_NEEDED)
        else:
            self.faults.append(f"key {key} is missing")
        return 0

    def count(self, key: str) -> int | None:
        """Return a whole number of at least 0; None when there is none, with a fault when there is something else."""
        value = self.config.get(key)
        if type(value) is int and 0 <= value < SIZE_LIMIT:
            return value
        if value is not None:
            self.wrong(key, value, f"a whole number from 0 to {SIZE_LIMIT - 1}")
        return None

    def counts(self, key: str) -> list[int]:
        """Return a list of whole numbers; an empty one when there is none, with a fault when there is something else."""
        value = self.config.get(key)
        if isinstance(value, list) and all(type(entry) is int for entry in value):
            return value
        if value is not None:
            self.wrong(key, value, "a list of whole numbers")
        return []

    def experts_key(self) -> str:
        found = {key: shown(self.config[key]) for key in _EXPERT_COUNTS if self.config.get(key) is not None}
        if not found:
            self.faults.append(f"none of the keys {', '.join(_EXPERT_COUNTS)} is there; needed: a mixture-of-experts model")
        elif len(set(found.values())) > 1:
            self.faults.append(" and ".join(f"{key} = {value}" for key, value in found.items()) + " disagree")
        return next(iter(found), "")

    def quantization(self) -> Mapping[str, Any] | None:
        """Return the quantization, which the kernels serve if there is no fault; None when there is none.

        Raises:
            UnsupportedError: a key holds a scheme that is not known.
        """
        quantization = self.config.get("quantization_config")
        self.known("expert_dtype", self.config.get("expert_dtype"), ("fp8", "fp4", None), section="")
        if quantization is None:
            return None
        if not isinstance(quantization, dict):
            self.wrong("quantization_config", quantization, "an object")
            return {}
        # Nothing else of a scheme means anything when its method is another one.
        if "quant_method" in quantization:
            self.known("quant_method", quantization["quant_method"], ("fp8",))
        for key in ("quant_method", "activation_scheme", "weight_block_size"):
            if key not in quantization:
                self.faults.append(f"key quantization_config.{key} is missing")
        for key, known in (
            ("fmt", ("e4m3",)),
            ("activation_scheme", ("dynamic", "static")),
            ("scale_fmt", ("ue8m0", "float32", None)),
            ("expert_dtype", ("fp8", "fp4", None)),
        ):
            if key in quantization:
                self.known(key, quantization[key], known)
        block = quantization.get("weight_block_size")
        # Compared by type too, as 128.0 and True equal whole numbers.
        if block is None or (isinstance(block, list) and len(block) == 2 and all(type(size) is int for size in block)):
            self.known("weight_block_size", block, ([SCALE_BLOCK, SCALE_BLOCK], [1, SCALE_BLOCK], None))
        else:
            self.wrong("quantization_config.weight_block_size", block, "a list of two whole numbers, or null")
        return quantization

    def known(self, key: str, value: object, known: tuple[object, ...], section: str = "quantization_config.") -> None:
        if value not in known:
            raise UnsupportedError(given=f"{section}{key} = {shown(value)} in {self.file}", supported=_SERVED)

    def scheme(self, quantization: Mapping[str, Any] | None) -> Scheme:
        """Return how the experts' weights are kept."""
        if quantization is None or self.experts_are_plain(quantization):
            return self.plain_scheme(quantized=quantization is not None)
        if "fp4" in (self.config.get("expert_dtype"), quantization.get("expert_dtype")):
            return Scheme.FP4
        block = quantization.get("weight_block_size")
        return Scheme.TENSOR if block is None else Scheme.ROWS if block == [1, SCALE_BLOCK] else Scheme.BLOCKS

    def plain_scheme(self, *, quantized: bool) -> Scheme:
        """Return the scheme of experts without quantization.

        Raises:
            UnsupportedError: their dtype has no kernels.
        """
        if not quantized and self.config.get("expert_dtype") is not None:
            self.faults.append(f"expert_dtype = {self.config['expert_dtype']} needs a quantization_config: {_SERVED}")
        named = [key for key in _DTYPES if self.config.get(key) is not None]
        if not named and quantized:
            self.faults.append(
                "key dtype (or torch_dtype) is missing and modules_to_not_convert lists the experts; needed: bfloat16"
            )
        elif not named:
            self.faults.append(f"keys quantization_config and dtype (or torch_dtype) are missing; needed: {_SERVED}")
        for key in named:
            self.known(key, self.config[key], ("bfloat16",), section="")
        return Scheme.BF16

    def experts_are_plain(self, quantization: Mapping[str, Any]) -> bool:
        """Return whether the checkpoint keeps the experts of all layers out of its quantization."""
        names = quantization.get("modules_to_not_convert")
        if names is None:
            return False
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.wrong("quantization_config.modules_to_not_convert", names, "a list of names")
            return False
        # A name with a layer number excludes that layer alone; a bare one excludes all of that name.
        parts = [name.split(".") for name in names]
        bare = [path[-1] for path in parts if not any(part.isdigit() for part in path)]
        return not {"experts", "mlp", "block_sparse_moe"}.isdisjoint(bare)

    def outside_experts(self, reason: str) -> list[Uncovered]:
        parts = ["attention projections"]
        shared = [(key, self.count(key)) for key in ("n_shared_experts", "shared_expert_intermediate_size")]
        parts += [f"shared experts ({key} = {value})" for key, value in shared if value][:1]
        for key, all_sparse in (("first_k_dense_replace", 0), ("decoder_sparse_step", 1)):
            value = self.count(key)
            if value not in (all_sparse, None):
                parts.append(f"dense MLP layers ({key} = {value})")
        dense = self.counts("mlp_only_layers")
        if dense:
            parts.append(f"dense MLP layers (mlp_only_layers = {shown(dense)})")
        # Every how many layers, or a list that says for each layer whether it has experts.
        key = "moe_layer_freq"
        sparse = self.counts(key) if isinstance(self.config.get(key), list) else [self.count(key)]
        if any(value not in (1, None) for value in sparse):
            parts.append(f"dense MLP layers ({key} = {shown(self.config[key])})")
        return [*(Uncovered(part, reason) for part in parts), Uncovered("router and lm_head", _PLAIN)]
