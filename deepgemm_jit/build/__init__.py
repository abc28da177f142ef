"""Build: a spec becomes a cubin, from the store or from the compiler. No GPU, no driver."""

from deepgemm_jit.build.builder import Builder, Built, Request, build

__all__ = ["Builder", "Built", "Request", "build"]
