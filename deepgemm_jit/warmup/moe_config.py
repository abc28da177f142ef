"""The built-in reading of a mixture-of-experts model's config.json: the sizes of its experts, and how their weights are kept.

Only files are read here: no checkpoint, no torch, no transformers. The experts of all layers of a model have one size, so one
layer stands for all. Key names are those of the published configs (Qwen, DeepSeek, GLM, Mixtral, MiniMax, Llama 4).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup.config import ConfigKeys, config_file, read_config
from deepgemm_jit.warmup.models import SCALE_BLOCK, ExpertsLayer, Model, Scheme, Uncovered
from deepgemm_jit.warmup.quantization import SERVED, read_quantization, require_bf16

READER = "builtin"

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_DTYPES = ("dtype", "torch_dtype")
_NOT_READ = "the built-in reading of a config finds experts only; with transformers installed, linears are planned too"
_ON_FIRST_CALL = "kernels compiled on the first call, unless a warm-up without --model built the whole set"
_PLAIN = "kept in the model's own dtype"
_FRAMEWORK = "the framework's own product"
_N_MAJOR = "which way they lie is not in the config"


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
    return _Reader(ConfigKeys(file, read_config(file))).model()


class _Reader:
    """One pass over a config."""

    def __init__(self, keys: ConfigKeys) -> None:
        self.keys = keys

    def model(self) -> Model:
        keys = self.keys
        hidden_size = keys.size("hidden_size")
        experts_key = self.experts_key()
        experts = keys.size(experts_key) if experts_key else 0
        # intermediate_size is the experts' width in the Mixtral family, which counts num_local_experts; elsewhere it is the
        # dense MLP's, and taking it for a missing moe_intermediate_size would plan the wrong kernels.
        is_mixtral = experts_key == "num_local_experts" and "moe_intermediate_size" not in keys.config
        width_key = "intermediate_size" if is_mixtral else "moe_intermediate_size"
        width = keys.size(width_key)
        per_token = keys.size("num_experts_per_tok")
        if experts and per_token > experts:
            keys.faults.append(f"num_experts_per_tok = {per_token} is more than {experts_key} = {experts}")
        quantization = read_quantization(keys)
        scheme = self.scheme(quantization)
        uncovered = self.outside_experts(quantized=quantization is not None)
        if scheme is Scheme.BF16:
            uncovered.append(Uncovered("experts that lie N-major, (E, K, N)", _N_MAJOR, _ON_FIRST_CALL))
        keys.raise_if_any()
        layer = ExpertsLayer(hidden_size, width, width_key, experts, experts_key, per_token, scheme)
        return Model(keys.file, READER, (layer,), (), tuple(uncovered))

    def experts_key(self) -> str:
        config, faults = self.keys.config, self.keys.faults
        found = {key: shown(config[key]) for key in _EXPERT_COUNTS if config.get(key) is not None}
        if not found:
            faults.append(f"none of the keys {', '.join(_EXPERT_COUNTS)} is there; needed: a mixture-of-experts model")
        elif len(set(found.values())) > 1:
            faults.append(" and ".join(f"{key} = {value}" for key, value in found.items()) + " disagree")
        return next(iter(found), "")

    def scheme(self, quantization: Mapping[str, Any] | None) -> Scheme:
        """Return how the experts' weights are kept."""
        if quantization is None or self.experts_are_plain(quantization):
            return self.plain_scheme(quantized=quantization is not None)
        if "fp4" in (self.keys.config.get("expert_dtype"), quantization.get("expert_dtype")):
            return Scheme.FP4
        block = quantization.get("weight_block_size")
        return Scheme.TENSOR if block is None else Scheme.ROWS if block == [1, SCALE_BLOCK] else Scheme.BLOCKS

    def plain_scheme(self, *, quantized: bool) -> Scheme:
        """Return the scheme of experts without quantization.

        Raises:
            UnsupportedError: their dtype has no kernels.
        """
        config, faults = self.keys.config, self.keys.faults
        if not quantized and config.get("expert_dtype") is not None:
            faults.append(f"expert_dtype = {config['expert_dtype']} needs a quantization_config: {SERVED}")
        named = [key for key in _DTYPES if config.get(key) is not None]
        if not named and quantized:
            faults.append("key dtype (or torch_dtype) is missing and modules_to_not_convert lists the experts; needed: bfloat16")
        elif not named:
            faults.append(f"keys quantization_config and dtype (or torch_dtype) are missing; needed: {SERVED}")
        for key in named:
            require_bf16(self.keys, key)
        return Scheme.BF16

    def experts_are_plain(self, quantization: Mapping[str, Any]) -> bool:
        """Return whether the checkpoint keeps the experts of all layers out of its quantization."""
        names = quantization.get("modules_to_not_convert")
        if names is None:
            return False
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.keys.wrong("quantization_config.modules_to_not_convert", names, "a list of names")
            return False
        # A name with a layer number excludes that layer alone; a bare one excludes all of that name.
        parts = [name.split(".") for name in names]
        bare = [path[-1] for path in parts if not any(part.isdigit() for part in path)]
        return not {"experts", "mlp", "block_sparse_moe"}.isdisjoint(bare)

    def outside_experts(self, *, quantized: bool) -> list[Uncovered]:
        keys = self.keys
        parts = ["attention projections"]
        shared = [(key, keys.count(key)) for key in ("n_shared_experts", "shared_expert_intermediate_size")]
        parts += [f"shared experts ({key} = {value})" for key, value in shared if value][:1]
        for key, all_sparse in (("first_k_dense_replace", 0), ("decoder_sparse_step", 1)):
            value = keys.count(key)
            if value not in (all_sparse, None):
                parts.append(f"dense MLP layers ({key} = {value})")
        dense = keys.counts("mlp_only_layers")
        if dense:
            parts.append(f"dense MLP layers (mlp_only_layers = {shown(dense)})")
        # Every how many layers, or a list that says for each layer whether it has experts.
        key = "moe_layer_freq"
        sparse = keys.counts(key) if isinstance(keys.config.get(key), list) else [keys.count(key)]
        if any(value not in (1, None) for value in sparse):
            parts.append(f"dense MLP layers ({key} = {shown(keys.config[key])})")
        reason, instead = (_NOT_READ, _ON_FIRST_CALL) if quantized else (_PLAIN, _FRAMEWORK)
        return [*(Uncovered(part, reason, instead) for part in parts), Uncovered("router and lm_head", _PLAIN, _FRAMEWORK)]
