"""Run something in a real fork of this process."""

from __future__ import annotations

import os
from collections.abc import Callable


def holds_in_fork(claim: Callable[[], bool]) -> bool:
    """Return whether ``claim`` returns True in a fork; an exception there counts as False and is printed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if claim() is True else 1
        except BaseException as error:  # the child must not run on as a second pytest
            print(f"in the fork: {error!r}", flush=True)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status == 0
