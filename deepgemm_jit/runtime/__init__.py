"""The CUDA driver, its contexts, and kernels loaded in them. The only package that talks to the driver."""

from deepgemm_jit.runtime.context import Context, ContextIdentity, Contexts
from deepgemm_jit.runtime.driver import Driver
from deepgemm_jit.runtime.launch import (
    CastCall,
    GemmCall,
    Launch,
    Matrices,
    ScaleLayoutCall,
    prepare_cast,
    prepare_gemm,
    prepare_scale_layout,
)
from deepgemm_jit.runtime.loaded import LoadedKernel, load_kernel
from deepgemm_jit.runtime.report import DriverReport, driver_report
from deepgemm_jit.runtime.tensormap import TensorMaps

__all__ = [
    "CastCall",
    "Context",
    "ContextIdentity",
    "Contexts",
    "Driver",
    "DriverReport",
    "GemmCall",
    "Launch",
    "LoadedKernel",
    "Matrices",
    "ScaleLayoutCall",
    "TensorMaps",
    "driver_report",
    "load_kernel",
    "prepare_cast",
    "prepare_gemm",
    "prepare_scale_layout",
]
