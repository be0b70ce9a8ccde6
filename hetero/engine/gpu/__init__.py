"""Decode steps as captured graphs of a GPU: the runner, its memory, and what the engine sees of it."""
