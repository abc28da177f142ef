"""Whole models for plans: an architecture of transformers, built from its config without weights, and what of it has kernels.

Modules are judged by the functions that judge them when a model runs, so that a plan covers what will run with us and no more.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepgemm_jit.errors import ToolchainError, UnsupportedError
from deepgemm_jit.integrations import experts, linears
from deepgemm_jit.ops.checks import MAX_TOP_K
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup import ExpertsLayer, Linear, Model, Scheme, Uncovered
from deepgemm_jit.warmup.config import ConfigKeys, config_file, read_config
from deepgemm_jit.warmup.quantization import read_quantization

_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_MOST_LAYERS = 1024
"""Several times what published models have, and few enough to build one module after another."""
_OWN_FORWARD = "the module's own forward in transformers"
_SCHEMES = {(128, 128): Scheme.BLOCKS, (1, 128): Scheme.ROWS, None: Scheme.TENSOR}


def read_model(path: str | os.PathLike[str]) -> Model:
    """Build the architecture that a config names and judge its modules.

    It is built on the meta device, where tensors have shapes and no memory: no checkpoint is read, no code of a checkpoint runs,
    and CUDA is not started.

    Args:
        path: a config.json or the folder that holds one.

    Raises:
        OperandError: the file cannot be read, is no JSON object, its quantization is incomplete, or its layers are no count.
        UnsupportedError: the weights are kept in a way that no kernel serves, or transformers cannot build the architecture.
        ToolchainError: there is no transformers.
    """
    file = config_file(path)
    config = read_config(file)
    keys = ConfigKeys(file, config)
    quantization = read_quantization(keys)
    _check_layers(keys)
    keys.raise_if_any()
    transformers = _transformers()
    reader = f"transformers {transformers.__version__}"
    try:
        model = _built(transformers, config, quantization)
    except Exception as error:  # whatever the classes of all architectures raise
        raise UnsupportedError(
            given=f"{file}, of which {reader} builds no model ({type(error).__name__}: {shown(str(error), 200)})",
            supported="the architectures of this transformers, without code from a checkpoint",
            advice="--reader builtin reads the sizes of experts from the config alone",
        ) from error
    parts = list(_parts(model))
    return Model(
        file,
        reader,
        tuple(_merged(part for part in parts if isinstance(part, ExpertsLayer))),
        tuple(_merged(part for part in parts if isinstance(part, Linear))),
        tuple(_named(part) for part in _merged(part for part in parts if isinstance(part, _Unserved))),
    )


@dataclass(frozen=True, slots=True)
class _Unserved:
    """A kind of module without kernels."""

    what: str
    reason: str
    instead: str
    modules: tuple[str, ...]


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ToolchainError(
            missing="transformers",
            looked_for="the architecture of a config",
            fix="Install it with: pip install 'deepgemm-jit[transformers]'; --reader builtin does without",
        ) from error


def _check_layers(keys: ConfigKeys) -> None:
    """Note counts of layers that would build nothing, or go on building for hours."""
    needed = f"a whole number from 1 to {_MOST_LAYERS}; published models have some hundreds at most"
    for key in _LAYERS:
        value = keys.config.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= _MOST_LAYERS):
            keys.wrong(key, value, needed)


def _built(transformers: Any, config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> nn.Module:
    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise LookupError(f"it knows no model_type = {shown(kind)}")
    configuration = transformers.CONFIG_MAPPING[kind].from_dict(dict(config))
    with torch.device("meta"):
        model: nn.Module = _architecture(transformers, configuration)._from_config(configuration)
    if quantization is not None:
        _quantize(model, quantization)
    return model


def _quantize(model: nn.Module, quantization: Mapping[str, Any]) -> None:
    """Replace modules by quantized ones, as transformers does before it loads weights."""
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.quantizers.auto import AutoHfQuantizer

    scales = "ue8m0" if quantization.get("scale_fmt") == "ue8m0" else "float"
    quantizer = AutoHfQuantizer.from_config({**quantization, "scale_fmt": scales}, pre_quantized=True)
    # transformers wraps these methods anew for each layer; a process that reads many models would run out of stack.
    methods = {name: getattr(FP8Experts, name) for name in ("__init__", "forward")}
    try:
        # Where there is no GPU, from_pretrained turns to dequantizing before it comes to this step, which needs none.
        quantizer.preprocess_model(model)
    finally:
        for name, method in methods.items():
            setattr(FP8Experts, name, method)


def _architecture(transformers: Any, configuration: Any) -> Any:
    for name in configuration.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    kind = type(configuration)
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if kind in mapping:
            return mapping[kind]
    raise LookupError(f"it has no model of architectures = {shown(configuration.architectures)}")


def _parts(model: nn.Module) -> Iterator[ExpertsLayer | Linear | _Unserved]:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    styles: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        # Layers differ in their number; transformers' own plans of tensor parallelism name them so too.
        name = ".".join("*" if part.isdigit() else part for part in path.split("."))
        if isinstance(module, FP8Linear):
            yield _linear(name, module, styles.get(name, ""))
        elif "down_proj" in module._parameters and module.down_proj.dim() == 3:
            yield _experts(name, module, model)
        elif isinstance(module, nn.Linear):
            reason = "not quantized; only FP8 linears run with us"
            yield _Unserved(_described(module), reason, _OWN_FORWARD, (name,))
        elif isinstance(module, nn.Embedding):
            yield _Unserved(_described(module), "a look-up, no product", _OWN_FORWARD, (name,))
        elif any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            yield _Unserved(_described(module), f"no operation for what {type(module).__name__} computes", _OWN_FORWARD, (name,))


def _linear(name: str, module: Any, style: str) -> Linear | _Unserved:
    reason = linears.reason_against(module)
    if reason is not None:
        return _Unserved(_described(module), reason, _OWN_FORWARD, (name,))
    n, k = module.weight.shape
    block = None if module.block_size is None else tuple(module.block_size)
    return Linear(n, k, _SCHEMES[block], "n" if "colwise" in style else "k" if "rowwise" in style else None, (name,))


def _experts(name: str, module: Any, model: Any) -> ExpertsLayer | _Unserved:
    if not hasattr(module, "has_gate"):
        reason = f"{type(module).__name__} takes no experts_implementation"
        return _Unserved(_described(module), reason, _OWN_FORWARD, (name,))
    try:
        experts.refuse_what_has_no_kernel(module)
    except UnsupportedError as refusal:
        return _Unserved(_described(module), f"{refusal.given}; supported: {refusal.supported}", refusal.advice, (name,))
    packed = module.down_proj.dtype == torch.int8
    count, hidden_size, width = module.down_proj.shape
    n_major = not packed and not experts.is_fp8(module) and bool(getattr(module, "is_transposed", False))
    if getattr(module, "is_transposed", False):
        hidden_size, width = width, hidden_size
    if packed:
        scheme, width = Scheme.FP4, 2 * width
    elif experts.is_fp8(module):
        scheme = _SCHEMES[None if module.block_size is None else tuple(module.block_size)]
    else:
        scheme = Scheme.BF16
    return ExpertsLayer(
        hidden_size=hidden_size,
        width=width,
        width_name=f"width of {name}",
        experts=count,
        experts_name=f"experts of {name}",
        per_token=_per_token(module, model, count),
        scheme=scheme,
        gated=bool(module.has_gate),
        n_major=n_major,
        modules=(name,),
    )


def _per_token(module: Any, model: Any, count: int) -> int:
    """Return how many experts a token visits; where no config says so, what the forward takes, which leaves no kernel out."""
    configurations = (getattr(module, "config", None), model.config.get_text_config())
    named = (getattr(configuration, key, None) for configuration in configurations for key in _PER_TOKEN)
    return next((number for number in named if type(number) is int and 1 <= number <= count), min(count, MAX_TOP_K))


def _described(module: nn.Module) -> str:
    """Return the class of a module and its largest weight."""
    weight = max(module.parameters(recurse=False), key=torch.Tensor.numel)
    return f"{type(module).__name__} {' x '.join(map(str, weight.shape))}, {str(weight.dtype).removeprefix('torch.')}"


def _merged(parts: Iterator[Any]) -> Iterator[Any]:
    """Yield one part for all that differ in their modules alone, in the order of the first."""
    merged: dict[Any, dict[str, None]] = {}
    for part in parts:
        merged.setdefault(replace(part, modules=()), {}).update(dict.fromkeys(part.modules))
    for part, names in merged.items():
        yield replace(part, modules=tuple(names))


def _named(part: _Unserved) -> Uncovered:
    return Uncovered(f"{part.what}: {', '.join(part.modules)}", part.reason, part.instead)
