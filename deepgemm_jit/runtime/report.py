"""What the driver says about this machine, for people who look for a fault."""

from __future__ import annotations

from dataclasses import dataclass

from deepgemm_jit.errors import DriverError, ToolchainError
from deepgemm_jit.runtime.driver import Driver


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    uuid: str


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The driver and its GPUs; either ``error`` says why there are none, or it is None."""

    version: tuple[int, int] | None
    """Newest CUDA version that the driver serves."""
    gpus: tuple[Gpu, ...]
    error: str | None


def driver_report(driver: Driver | None = None) -> DriverReport:
    """Ask the driver for its version and its GPUs; creates no context and raises nothing."""
    driver = driver or Driver()
    version = None
    try:
        version = driver.driver_version()
        return DriverReport(version, tuple(_gpu(driver, ordinal) for ordinal in range(driver.device_count())), None)
    except (DriverError, ToolchainError) as error:
        return DriverReport(version, (), str(error))


def _gpu(driver: Driver, ordinal: int) -> Gpu:
    return Gpu(ordinal, driver.device_name(ordinal), driver.compute_capability(ordinal), driver.device_uuid(ordinal))
