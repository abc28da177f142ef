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
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import deepgemm_jit.ops  # noqa: F401 - before all that imports torch: where there is none, this says what to do

# isort: split
import torch
from torch import nn

from deepgemm_jit.errors import OperandError, ToolchainError
from deepgemm_jit.integrations import experts, linears
from deepgemm_jit.integrations.gates import gate_seen
from deepgemm_jit.integrations.problems import Needs, experts_needs, kernels_for, linear_needs
from deepgemm_jit.ops.weights import Decode, leaves_free
from deepgemm_jit.service import KernelService, Preparation, default_service
from deepgemm_jit.spec import ARCHES, KernelSpec, arch_named
from deepgemm_jit.spec.shown import shown
from deepgemm_jit.warmup import DEFAULT_MAX_TOKENS, sms_faults

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "deepgemm_jit"
"""What ``experts_implementation`` is to say."""

_PACKAGE = "transformers.integrations"
_SPARE_SHARE = 0.25
"""Of a GPU's memory, that the fragments of a model leave free: caches and workspaces are still to come."""
logger = logging.getLogger("deepgemm_jit.transformers")


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


def prepare(model: nn.Module, *, decode: Decode = "auto") -> int:
    """Prepare all that runs with us in a model, which otherwise happens in its first forward.

    Call it before layers are compiled, which then share a graph; before a CUDA graph is captured with no forward before it; and
    after weights of a compiled model or of a captured graph were replaced or loaded in place. Both read what was prepared and do
    not look at whether it is of the parameters: it is overwritten here, where they find it.

    Args:
        model: its experts are prepared where their configuration names this implementation, its linears where accelerated.
        decode: what forwards of few tokens read of FP4 experts; it says nothing of others. "fp8": the folded copy, as those of
            many tokens, and as without this call. "fp4": fragments kept beside it, about half of its bytes, unless their kernel
            cannot read the scales. "auto": fragments of FP4 experts that were never prepared, on each GPU of which a quarter
            stays free with their folded copies and fragments; the log says so. Fragments once made stay, whatever is said later.

    Returns:
        The bytes of device memory that the preparations hold beside the parameters.

    Raises:
        UnsupportedError: experts of a scheme without kernel.
        OperandError: another word for ``decode``.
    """
    if not (isinstance(decode, str) and decode in ("auto", "fp4", "fp8")):
        raise OperandError(operation="prepare", faults=[f"decode = {shown(decode)} must be 'auto', 'fp4' or 'fp8'"])
    # What was prepared stays of its kind if nobody says otherwise: a captured graph reads it, and shall give the bits of a call.
    new = [module for module in model.modules() if _runs_our_experts(module) and not experts.is_prepared(module)]
    roomy = _with_room(new) if decode == "auto" else set()
    keeping = {id(module) for module in new if module.down_proj.device in roomy}
    added_bytes = 0
    for module in model.modules():
        if _runs_our_experts(module):
            added_bytes += experts.prepare(module, fragments=decode == "fp4" or id(module) in keeping)
        elif linears.is_replaced(module):
            added_bytes += linears.prepare(module)
    return added_bytes


def _with_room(modules: Iterable[nn.Module]) -> set[torch.device]:
    """Return the GPUs that have room for the fragments of all FP4 experts which lie there."""
    taken: dict[torch.device, int] = {}
    for module in modules:
        folded, fragments = experts.bytes_to_prepare(module)
        device = module.down_proj.device
        if fragments and device.type == "cuda":
            taken[device] = taken.get(device, 0) + folded + fragments
    found = {device for device, needed_bytes in taken.items() if leaves_free(device, needed_bytes, _SPARE_SHARE)}
    for device, needed_bytes in taken.items():
        outcome = "are kept as fragments too" if device in found else "are folded only"
        logger.info("FP4 experts on %s %s: both would take %.1f GB more", device, outcome, needed_bytes / 1e9)
    return found


def prepare_kernels(
    model: nn.Module,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    group: ProcessGroup | None = None,
    sms: Iterable[int] | None = None,
    arch: str | None = None,
    jobs: int | None = None,
) -> Preparation:
    """Build and load the kernels of all that runs with us in a model, so that its first forward compiles and loads nothing.

    The kernels are those that selection can ask for, for any number of tokens up to ``max_tokens``, on the GPUs that the model
    lies on; where it lies on none they are built only. See :meth:`KernelService.prepare`.

    Args:
        model: its experts count where their configuration names this implementation, its linears where accelerated.
        max_tokens: most tokens that one forward brings to this process.
        group: ranks that compile each kernel once between them; all must make this call, for their own parts of the model.
        sms: SM counts that ``set_num_sms`` is going to set, to be ready for beside that of each GPU and the limit on it now;
            without a GPU the only ones, by default every count up to the arch's largest.
        arch: compiler target where the model lies on no GPU.
        jobs: compiles at a time in this process; default: the setting, or its CPUs.

    Raises:
        UnsupportedError: experts of a scheme without kernel.
        OperandError: a number that is none, or neither a GPU nor an arch.
        KernelNotBuiltError, CompileError, ToolchainError, DriverError: as of :meth:`KernelService.prepare`.

    With a ``group`` every rank raises the error of the one that failed.
    """
    service = default_service()

    def wanted() -> tuple[list[KernelSpec], list[int]]:
        return _wanted(service, model, max_tokens, sms, arch)

    if group is None:
        specs, ordinals = wanted()
        return service.prepare(specs, ordinals, jobs=jobs)
    from deepgemm_jit.integrations.ranks import prepare_together

    return prepare_together(service, wanted, jobs, group)


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
        reason = linears.reason_against(module)
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


def _wanted(
    service: KernelService, model: nn.Module, max_tokens: int, sms: Iterable[int] | None, arch: str | None
) -> tuple[list[KernelSpec], list[int]]:
    """Return the kernels that the modules which run with us can ask for, and the GPUs that they lie on."""
    faults = []
    if type(max_tokens) is not int or max_tokens < 1:
        faults.append(f"max_tokens = {shown(max_tokens)}, needed: a whole number of at least 1")
    given: object = () if sms is None else sms
    counts = tuple(given) if isinstance(given, Iterable) else ()
    if not isinstance(given, Iterable):
        faults.append(f"sms = {shown(given)}, needed: SM counts, as [{shown(given)}]")
    faults += sms_faults(None, counts)
    if faults:
        raise OperandError(operation="prepare_kernels", faults=faults)
    needs, ordinals = _needs_of(model, max_tokens)
    if not needs:
        logger.warning("no module of this %s runs with deepgemm_jit: there is no kernel to prepare", type(model).__name__)
    arch_sms: dict[str, set[int]] = {}
    later = set(counts)
    for ordinal in ordinals:
        with service.call(ordinal, 0) as call:
            arch_sms.setdefault(call.limits.arch, set()).update({call.limits.sms, call.context.sms})
    if needs and not ordinals:
        if arch is None:
            fault = f"the model lies on no GPU: move it to one first, or name an arch to build for: {', '.join(ARCHES)}"
            raise OperandError(operation="prepare_kernels", faults=[fault])
        arch_sms[arch] = set() if later else set(range(1, arch_named(arch).max_sms + 1))
    specs = [spec for target, seen in arch_sms.items() for spec in kernels_for(needs, target, sorted(seen | later))]
    return specs, ordinals


def _needs_of(model: nn.Module, max_tokens: int) -> tuple[list[Needs], list[int]]:
    """Return what the modules that run with us need, and the GPUs that they lie on."""
    needs, ordinals = [], set()
    for module in model.modules():
        if _runs_our_experts(module):
            needs.append(experts_needs(module, max_tokens))
        elif linears.is_replaced(module):
            needs.append(linear_needs(module, max_tokens))
        else:
            continue
        ordinals |= {parameter.device.index for parameter in module.parameters(recurse=False) if parameter.is_cuda}
    return needs, sorted(ordinals)


def _runs_our_experts(module: nn.Module) -> bool:
    configuration = getattr(module, "config", None)
    # Whole models have a configuration too; an experts module has weights of its own beside it.
    return "down_proj" in module._parameters and getattr(configuration, "_experts_implementation", None) == NAME
