"""The command line, ``deepgemm-jit``: the only place that prints."""

from deepgemm_jit.cli.app import main

__all__ = ["main"]
