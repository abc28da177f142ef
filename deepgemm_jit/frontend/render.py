"""Rendering: a spec becomes one translation unit with its headers, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from deepgemm_jit.errors import ToolchainError, UnsupportedError
from deepgemm_jit.frontend.sources import included_headers, templates_dir
from deepgemm_jit.frontend.wgmma import wrapper_for, wrapper_name
from deepgemm_jit.spec import FP4_GEMM_SWAP_AB, N_MAJOR, ROW_SCALES, SWAPPED, KernelSpec, is_gemm
from deepgemm_jit.spec.kernel_set import blocks_per_sm, dynamic_shared_memory_bytes, threads

if TYPE_CHECKING:
    from jinja2 import Environment

_WRAPPER_HEADER = "dj/generated/wgmma_wrapper.cuh"


@dataclass(frozen=True, slots=True)
class Source:
    """One rendered translation unit with the headers it may include."""

    entry: str
    text: str
    headers: Mapping[str, str]


@cache
def _environment() -> Environment:
    # Imported here: an import of the package must stay cheap, and a hit in a context's cache never renders.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(templates_dir()),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=False,
        autoescape=False,  # noqa: S701 - the output is CUDA C++
    )


def _no_template(family: str) -> UnsupportedError | ToolchainError:
    known = sorted(path.name.removesuffix(".cu.j2") for path in templates_dir().glob("*.cu.j2"))
    if known:
        return UnsupportedError(given=f"kernel family {family!r}", supported=", ".join(known))
    return ToolchainError(
        missing="kernel templates", looked_for=f"{family}.cu.j2", fix="Reinstall deepgemm-jit: its package data is gone"
    )


@cache
def render(spec: KernelSpec) -> Source:
    """Render the translation unit of ``spec``. Pure: the same spec and the same installed sources give the same bytes.

    Raises:
        UnsupportedError: there is no template for the family.
        ToolchainError: a template or header that it needs is missing.
    """
    from jinja2 import TemplateNotFound

    try:
        template = _environment().get_template(f"{spec.family}.cu.j2")
    except TemplateNotFound:
        raise _no_template(spec.family) from None
    constants: dict[str, Any] = {
        "spec": spec,
        "threads": threads(spec),
        "blocks_per_sm": blocks_per_sm(spec),
        "shared_memory_bytes": dynamic_shared_memory_bytes(spec),
    }
    generated: dict[str, str] = {}
    if is_gemm(spec):
        block_m, block_n, block_k = spec.block
        # The columns of a product: of B, or tokens where the operands are swapped.
        columns = block_m if spec.family in SWAPPED else block_n
        wrapper = wrapper_name(spec.dtypes[0], columns, registers=spec.family == FP4_GEMM_SWAP_AB)
        constants |= {"block_m": block_m, "block_n": block_n, "block_k": block_k, "stages": spec.stages, "wrapper": wrapper}
        constants |= {flag: flag in spec.flags for flag in (ROW_SCALES, N_MAJOR)}
        generated[_WRAPPER_HEADER] = wrapper_for(wrapper)
    text = template.render(constants)
    return Source(spec.name, text, MappingProxyType(dict(included_headers(text, generated))))
