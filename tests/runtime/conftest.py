"""The driver double, and the way to it: tests import nothing from each other but this."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
