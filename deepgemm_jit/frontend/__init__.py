"""The front end: kernel templates and device headers become translation units in memory."""

from deepgemm_jit.frontend.render import Source, render
from deepgemm_jit.frontend.wgmma import header_path

__all__ = ["Source", "header_path", "render"]
