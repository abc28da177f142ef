"""A model's config.json: the sizes of its experts, and what of the model no kernel is planned for.

Only files are read here: no checkpoint, no torch, no transformers. The experts of all layers of a model have one size, so one
layer stands for all. Key names are those of the published configs (Qwen, DeepSeek, GLM, Mixtral, MiniMax, Llama 4).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepgemm_jit.errors import OperandError, UnsupportedError

CONFIG_NAME = "config.json"
SCALE_BLOCK = 128
"""Rows and columns of a weight that share one scale."""

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_SERVED = "quant_method fp8, fmt e4m3, weight_block_size [128, 128], activation_scheme dynamic"
_WHOLE_SET = "not read from the config yet; a warm-up without --model builds the whole kernel set, which serves all FP8 linears"
_PLAIN = "kept in the model's own dtype by the checkpoint, for which there are no kernels yet"


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
        experts_covered: False when the experts themselves are among ``uncovered``.
        uncovered: the parts without a plan.
    """

    path: Path
    hidden_size: int
    intermediate_size: int
    intermediate_key: str
    experts: int
    experts_key: str
    experts_per_token: int
    experts_covered: bool
    uncovered: tuple[Uncovered, ...]


def read_model(path: str | os.PathLike[str]) -> Model:
    """Read the config of a model.

    Args:
        path: a config.json or the folder that holds one.

    Raises:
        OperandError: the file cannot be read, is no JSON object, or lacks a key or holds a meaningless value; all such keys are
            named at once.
        UnsupportedError: the weights are quantized in a way that no kernel serves.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_NAME
    return _Reader(file, _read_object(file)).model()


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        if not file.is_file():
            raise FileNotFoundError(f"no file {file.name} there" if file.parent.is_dir() else "no such folder")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(file, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(file, f"is not complete JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise _refused(file, f"holds a JSON {type(value).__name__}, needed: an object with the model's keys")
    return value


def _refused(file: Path, *faults: str) -> OperandError:
    return OperandError(operation=f"model config {file}", faults=faults)


class _Reader:
    """One pass over a config, which collects its faults so that a user sees them all at once."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self.file = file
        # Configs of models that also see or hear keep the language model's keys in text_config.
        text = config.get("text_config")
        self.config: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
        self.faults: list[str] = []

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
        if self.faults:
            raise _refused(self.file, *self.faults)
        without_kernels = self.experts_without_kernels(quantization)
        return Model(
            path=self.file,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            intermediate_key=intermediate_key,
            experts=experts,
            experts_key=experts_key,
            experts_per_token=experts_per_token,
            experts_covered=not without_kernels,
            uncovered=tuple(
                [Uncovered("experts: gate_up and down", reason) for reason in without_kernels] + self.outside_experts()
            ),
        )

    def size(self, key: str) -> int:
        """Return a whole number of at least 1; note a fault and return 0 when there is none."""
        value = self.config.get(key)
        if type(value) is int and value > 0:
            return value
        missing = key not in self.config
        self.faults.append(f"key {key} is missing" if missing else f"{key} = {value!r}, needed: a whole number of at least 1")
        return 0

    def experts_key(self) -> str:
        found = {key: self.config[key] for key in _EXPERT_COUNTS if self.config.get(key) is not None}
        if not found:
            self.faults.append(f"none of the keys {', '.join(_EXPERT_COUNTS)} is there; needed: a mixture-of-experts model")
        elif len(set(map(repr, found.values()))) > 1:
            self.faults.append(" and ".join(f"{key} = {value!r}" for key, value in found.items()) + " disagree")
        return next(iter(found), "")

    def quantization(self) -> Mapping[str, Any]:
        """Return the quantization the kernels can serve, or at least name.

        Raises:
            UnsupportedError: a key holds a scheme that is not known.
        """
        quantization = self.config.get("quantization_config")
        if quantization is None:
            self.faults.append(f"key quantization_config is missing: the weights are not quantized; needed: {_SERVED}")
            return {}
        if not isinstance(quantization, dict):
            self.faults.append(f"quantization_config = {quantization!r}, needed: an object")
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
            ("weight_block_size", ([SCALE_BLOCK, SCALE_BLOCK],)),
            ("scale_fmt", ("ue8m0", "float32", None)),
            ("expert_dtype", ("fp8", "fp4", None)),
        ):
            if key in quantization:
                self.known(key, quantization[key], known)
        self.known("expert_dtype", self.config.get("expert_dtype"), ("fp8", "fp4", None), section="")
        return quantization

    def known(self, key: str, value: object, known: tuple[object, ...], section: str = "quantization_config.") -> None:
        if value not in known:
            raise UnsupportedError(given=f"{section}{key} = {json.dumps(value)} in {self.file}", supported=_SERVED)

    def experts_without_kernels(self, quantization: Mapping[str, Any]) -> list[str]:
        """Return the reasons for which the experts have no kernels."""
        reasons = []
        if "fp4" in (self.config.get("expert_dtype"), quantization.get("expert_dtype")):
            reasons.append("expert_dtype = fp4: there are no kernels for FP4 weights yet")
        if quantization.get("activation_scheme") == "static":
            reasons.append(
                "activation_scheme = static: activation scales from the checkpoint are not served yet, only dynamic ones"
            )
        # A name with a layer number excludes that layer alone; a bare one excludes all of that name.
        bare = [
            name
            for name in quantization.get("modules_to_not_convert") or ()
            if isinstance(name, str)
            and name.split(".")[-1] in ("experts", "mlp", "block_sparse_moe")
            and not any(part.isdigit() for part in name.split("."))
        ]
        if bare:
            reasons.append(f"modules_to_not_convert lists {bare[0]}: {_PLAIN}")
        return reasons

    def outside_experts(self) -> list[Uncovered]:
        parts = ["attention projections"]
        shared = next((key for key in ("n_shared_experts", "shared_expert_intermediate_size") if self.config.get(key)), None)
        if shared:
            parts.append(f"shared experts ({shared} = {self.config[shared]})")
        for key, all_sparse in (
            ("first_k_dense_replace", 0),
            ("mlp_only_layers", []),
            ("decoder_sparse_step", 1),
            ("moe_layer_freq", 1),
        ):
            if self.config.get(key, all_sparse) not in (all_sparse, None):
                parts.append(f"dense MLP layers ({key} = {self.config[key]})")
        return [*(Uncovered(part, _WHOLE_SET) for part in parts), Uncovered("router and lm_head", _PLAIN)]
