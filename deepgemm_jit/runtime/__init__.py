"""The CUDA driver, its contexts, and kernels loaded in them. The only package that talks to the driver."""

from deepgemm_jit.runtime.context import Context, ContextIdentity, Contexts
from deepgemm_jit.runtime.driver import Driver
from deepgemm_jit.runtime.loaded import LoadedKernel, load_kernel
from deepgemm_jit.runtime.report import DriverReport, driver_report

__all__ = [
    "Context",
    "ContextIdentity",
    "Contexts",
    "Driver",
    "DriverReport",
    "LoadedKernel",
    "driver_report",
    "load_kernel",
]
