"""Operators that take the place of a model's modules. Importing the package registers them."""

from hetero.ops import fused, keep, linear, moe

__all__ = ["fused", "keep", "linear", "moe"]
