"""The group of all commands."""

from __future__ import annotations

import click

from deepgemm_jit.__about__ import __version__
from deepgemm_jit.cli.doctor import doctor
from deepgemm_jit.cli.housekeeping import clear, prune
from deepgemm_jit.cli.packs import pack
from deepgemm_jit.cli.planning import kernels, plan
from deepgemm_jit.cli.stored import list_, show, verify
from deepgemm_jit.cli.terminal import Program
from deepgemm_jit.cli.warmup import warmup


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, package_name="deepgemm-jit")
def main() -> None:
    """Compile the kernels of FP8 mixture-of-experts models ahead of time: no GPU, no nvcc, no CUDA toolkit.

    Exit status: 0 done, 1 something failed or is missing, 2 wrong usage.
    """


for _command in (kernels, plan, warmup, verify, list_, show, pack, prune, clear, doctor):
    main.add_command(_command)
