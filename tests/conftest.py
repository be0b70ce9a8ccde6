"""Settings of every test."""

from __future__ import annotations

import contextlib
import os

# Times differ from machine to machine and from run to run; tests that want them ask for them.
os.environ.setdefault("HETERO_TUNE", "off")

# Explaining a failure traces every line of a test. On Python 3.11 a traced test once went on for ever, in a
# process whose threads send each other exceptions, as the bound on a chat template's time does.
with contextlib.suppress(ImportError):  # machines that run the kernels' tests alone do not have it
    from hypothesis import Phase, settings

    settings.register_profile("untraced", phases=[phase for phase in Phase if phase is not Phase.explain])
    settings.load_profile("untraced")
