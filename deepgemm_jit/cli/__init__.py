"""The command line, ``deepgemm-jit``: the only place that prints."""

import sys

try:
    from deepgemm_jit.cli.app import main
except KeyboardInterrupt:  # Ctrl-C before there is a program that could catch it
    sys.exit("Aborted!")

__all__ = ["main"]
