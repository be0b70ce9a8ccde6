"""Operators that take the place of a model's modules. Importing the package registers them."""

from hetero.ops import keep, linear, moe

__all__ = ["keep", "linear", "moe"]
