"""``python -m deepgemm_jit``: the command line."""

from deepgemm_jit.cli import main

main(prog_name="deepgemm-jit")
