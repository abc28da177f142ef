"""The CUDA driver, its contexts, and kernels loaded in them. The only package that talks to the driver."""

from deepgemm_jit.runtime.context import Context, ContextIdentity, Contexts
from deepgemm_jit.runtime.driver import Driver
from deepgemm_jit.runtime.launch import GemmCall, Matrices, prepare_gemm
from deepgemm_jit.runtime.loaded import LoadedKernel, load_kernel
from deepgemm_jit.runtime.params import KeptLaunch, Launch, keep
from deepgemm_jit.runtime.report import DriverReport, driver_report
from deepgemm_jit.runtime.tensormap import TensorMaps

__all__ = [
    "Context",
    "ContextIdentity",
    "Contexts",
    "Driver",
    "DriverReport",
    "GemmCall",
    "KeptLaunch",
    "Launch",
    "LoadedKernel",
    "Matrices",
    "TensorMaps",
    "driver_report",
    "keep",
    "load_kernel",
    "prepare_gemm",
]
