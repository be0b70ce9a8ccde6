"""Operators that take the place of a model's modules. Importing the package registers them."""

from hetero.ops import embedding, fused, keep, linear, moe

__all__ = ["embedding", "fused", "keep", "linear", "moe"]
