"""Settings of every test."""

from __future__ import annotations

import os

# Times differ from machine to machine and from run to run; tests that want them ask for them.
os.environ.setdefault("HETERO_TUNE", "off")
