"""deepgemm_jit in transformers: ``experts_implementation="deepgemm_jit"``, and FP8 linears on our dense GEMM.

::

    from deepgemm_jit.integrations import transformers as deepgemm_jit

    deepgemm_jit.register()
    model = AutoModelForCausalLM.from_pretrained(path, device_map="auto", experts_implementation="deepgemm_jit")
    with deepgemm_jit.accelerate_linears(model):
        model.generate(...)

transformers itself is imported by the calls, never by importing this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch import nn

from deepgemm_jit.errors import OperandError, ToolchainError
from deepgemm_jit.integrations import experts, linears
from deepgemm_jit.integrations.gates import gate_seen

NAME = "deepgemm_jit"
"""What ``experts_implementation`` is to say."""

_PACKAGE = "transformers.integrations"


def register() -> None:
    """Make ``experts_implementation="deepgemm_jit"`` known to transformers, for FP8 and for bfloat16 experts.

    Twice is once. Call it before ``from_pretrained`` or ``set_experts_implementation`` names it.

    Raises:
        OperandError: someone else registered another function under the name; nothing is changed.
        ToolchainError: there is no transformers, or one without experts interfaces.
    """
    wanted = (
        (_find("finegrained_fp8", "ALL_FP8_EXPERTS_FUNCTIONS"), experts.fp8_experts_forward),
        (_find("moe", "ALL_EXPERTS_FUNCTIONS"), experts.bf16_experts_forward),
    )
    taken = [_fault(interface, forward) for interface, forward in wanted if not _is_free(interface, forward)]
    if taken:
        raise OperandError(operation="deepgemm_jit.integrations.transformers.register", faults=taken)
    # Seen now and remembered: a first forward may be one of fake tensors, which have no numbers to compare.
    gate_seen(_find("finegrained_fp8", "FP8Experts")._apply_gate)
    gate_seen(_find("moe", "_default_apply_gate"))
    for interface, forward in wanted:
        type(interface).register(NAME, forward)


def prepare(model: nn.Module) -> int:
    """Prepare all that runs with us in a model, which otherwise happens in its first forward.

    Call it before layers are compiled, which then share a graph; before a CUDA graph is captured with no forward before it; and
    after weights of a compiled model or of a captured graph were replaced or loaded in place. Both read what was prepared and do
    not look at whether it is of the parameters: it is overwritten here, where they find it.

    Args:
        model: its experts are prepared where their configuration names this implementation, its linears where accelerated.

    Returns:
        The bytes of device memory that the preparations hold beside the parameters.

    Raises:
        UnsupportedError: experts of a scheme without kernel.
    """
    added_bytes = 0
    for module in model.modules():
        if _runs_our_experts(module):
            added_bytes += experts.prepare(module)
        elif linears.is_replaced(module):
            added_bytes += linears.prepare(module)
    return added_bytes


class AcceleratedLinears:
    """The linears of a model that run with us; a context manager that restores those that it changed, at its end.

    Attributes:
        served: names of the linears whose forward is ours.
        skipped: names of FP8 linears left alone, with the reason.
    """

    def __init__(self, changed: Sequence[nn.Module], served: tuple[str, ...], skipped: Mapping[str, str]) -> None:
        self._changed = changed
        self.served = served
        self.skipped = skipped

    def __repr__(self) -> str:
        return f"AcceleratedLinears(served={len(self.served)}, skipped={dict(self.skipped)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for module in self._changed:
            linears.restore_forward(module)


def accelerate_linears(model: nn.Module) -> AcceleratedLinears:
    """Run the FP8 linears of a model on our dense GEMM, with dynamic and with static activations.

    Their parameters stay as they are. FP8 linears without kernel are left alone and reported.

    Args:
        model: a transformers model, or any module that holds ``FP8Linear`` modules.

    Returns:
        What was done; leave it as a context to undo it, or call :func:`restore` to undo this and all that was done before.

    Raises:
        ToolchainError: there is no transformers, or one without FP8 linears.
    """
    fp8_linear = _find("finegrained_fp8", "FP8Linear")
    changed, served, skipped = [], [], {}
    for name, module in model.named_modules():
        if not isinstance(module, fp8_linear):
            continue
        reason = None if type(module) is fp8_linear else f"{type(module).__name__} has a forward of its own"
        reason = reason or linears.reason_against(module)
        if reason is None:
            if linears.replace_forward(module):
                changed.append(module)
            served.append(name)
        else:
            skipped[name] = reason
    return AcceleratedLinears(changed, tuple(served), skipped)


def restore(model: nn.Module) -> None:
    """Give the linears of a model their own forward back; those that have it are left alone."""
    for module in model.modules():
        linears.restore_forward(module)


def _find(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ToolchainError(
            missing="transformers",
            looked_for=f"{_PACKAGE}.{module}.{name}",
            fix="Install it with: pip install transformers accelerate",
        ) from error


def _is_free(interface: Any, forward: Callable[..., Any]) -> bool:
    return NAME not in interface or interface[NAME] is forward


def _fault(interface: Any, forward: Callable[..., Any]) -> str:
    other = interface[NAME]
    described = f"{getattr(other, '__module__', '?')}.{getattr(other, '__qualname__', repr(other))}"
    return f"{type(interface).__name__} has {described} under {NAME!r} and not {forward.__name__}; take it out first"


def _runs_our_experts(module: nn.Module) -> bool:
    configuration = getattr(module, "config", None)
    # Whole models have a configuration too; an experts module has weights of its own beside it.
    return "down_proj" in module._parameters and getattr(configuration, "_experts_implementation", None) == NAME
