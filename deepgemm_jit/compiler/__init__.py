"""The compiler: translation units become cubins through NVRTC."""

from deepgemm_jit.compiler.installed import InstalledNvrtc, installed_nvrtcs
from deepgemm_jit.compiler.nvrtc import Compiled, NvrtcInfo, compile_options, compile_source, nvrtc_info

__all__ = [
    "Compiled",
    "InstalledNvrtc",
    "NvrtcInfo",
    "compile_options",
    "compile_source",
    "installed_nvrtcs",
    "nvrtc_info",
]
