"""Which GPUs the kernels run on, by an explicit list, and why they do not run on the others."""

from __future__ import annotations

from dataclasses import dataclass

from deepgemm_jit.errors import UnsupportedError
from deepgemm_jit.spec.shown import shown


@dataclass(frozen=True, slots=True)
class Arch:
    """A compiler target and the largest device of it."""

    name: str
    compute_capability: tuple[int, int]
    max_sms: int
    shared_memory_bytes: int


# Shared memory per block: CUDA C++ Programming Guide, table of technical specifications per compute capability (227 KB on 9.0).
# 132 SMs is the largest Hopper part sold; a device with more is still served, its plan takes --sms.
ARCHES: dict[str, Arch] = {"sm_90a": Arch("sm_90a", (9, 0), 132, 227 * 1024)}

# What a kernel of sm_90a is made of: the copy engine (TMA), products of warpgroups (WGMMA) and 227 KB of shared memory per block.
# PTX ISA, "Tensor Memory Accelerator" and wgmma.mma_async; an arch with the suffix "a" runs on its own compute capability alone.
_AMPERE = "Ampere has neither FP8 tensor cores nor TMA nor the WGMMA products that the kernels are made of"
_ADA = "Ada has FP8 tensor cores, but neither TMA nor the WGMMA products that the kernels are made of"
_TCGEN05 = "Blackwell of data centers and Thor has tcgen05 in place of the WGMMA products that the kernels are made of"
_SMALL_BLACKWELL = "Blackwell of workstations and GB10 has neither WGMMA nor tcgen05, and 99 KB of shared memory per block"
_REASONS: dict[tuple[int, int], str] = {
    (8, 0): _AMPERE,
    (8, 6): _AMPERE,
    (8, 7): _AMPERE,
    (8, 9): _ADA,
    (10, 0): _TCGEN05,
    (10, 1): _TCGEN05,
    (10, 3): _TCGEN05,
    (11, 0): _TCGEN05,
    (12, 0): _SMALL_BLACKWELL,
    (12, 1): _SMALL_BLACKWELL,
}
_OLD = "GPUs before Ampere have neither the tensor cores nor the asynchronous copies that the kernels are made of"
_UNKNOWN = "this version does not know it, and runs nothing on what it does not know"


@dataclass(frozen=True, slots=True)
class Support:
    """Whether the kernels run on a GPU; true or false as a condition.

    Attributes:
        arch: the arch whose kernels it runs, None where it runs none.
        reason: why not; empty where it runs them.
    """

    arch: str | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.arch is not None


def is_supported(compute_capability: tuple[int, int] | None) -> Support:
    """Return whether the kernels run on a GPU of this compute capability, and why not: no driver is asked, nothing is loaded.

    For callers that choose another way before they load weights. A slice of a GPU (MIG) counts as the GPU.

    Args:
        compute_capability: as ``torch.cuda.get_device_capability()`` gives it; None for no GPU.
    """
    if compute_capability is None:
        return Support(None, "there is no GPU")
    capability = (compute_capability[0], compute_capability[1])
    for arch in ARCHES.values():
        if arch.compute_capability == capability:
            return Support(arch.name)
    return Support(None, _REASONS.get(capability, _OLD if capability < (8, 0) else _UNKNOWN))


def arch_named(name: str) -> Arch:
    """Return the arch called ``name``.

    Raises:
        UnsupportedError: there are no kernels for it; names those there are.
    """
    arch = ARCHES.get(name) if isinstance(name, str) else None
    if arch is None:
        raise UnsupportedError(given=f"arch {shown(name)}", supported=", ".join(ARCHES), advice=_arch_advice(name))
    return arch


def arch_of(compute_capability: tuple[int, int]) -> Arch:
    """Return the arch that serves a compute capability, by an explicit list: an unknown one is refused, never guessed.

    Raises:
        UnsupportedError: no arch of this package runs on it; says why.
    """
    support = is_supported(compute_capability)
    if support.arch is not None:
        return ARCHES[support.arch]
    listed = ", ".join(
        f"{arch.name} (compute capability {'.'.join(map(str, arch.compute_capability))})" for arch in ARCHES.values()
    )
    given = "compute capability " + ".".join(map(str, compute_capability))
    raise UnsupportedError(given=given, supported=listed, advice=support.reason[0].upper() + support.reason[1:])


def _arch_advice(name: object) -> str:
    if not isinstance(name, str):
        return "An arch is named by a string"
    near = [known for known in ARCHES if name.rstrip("af") == known.rstrip("af")]
    return f"Did you mean {near[0]}? Its kernels need the arch-specific suffix" if near else ""
