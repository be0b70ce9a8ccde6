"""Triton's kernels, on the GPU where there is one, else by Triton's interpreter."""

from __future__ import annotations

import os

import torch

# Read when a kernel is defined, so before the kernels are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
