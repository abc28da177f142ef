"""The compiler: translation units become cubins through NVRTC."""

from deepgemm_jit.compiler.nvrtc import Compiled, NvrtcInfo, compile_options, compile_source, nvrtc_info

__all__ = ["Compiled", "NvrtcInfo", "compile_options", "compile_source", "nvrtc_info"]
