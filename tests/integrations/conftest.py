"""A limit of time for every test that runs on a GPU, as in the tests of the operations."""

from ops.conftest import gpu_time_limit

__all__ = ["gpu_time_limit"]
