"""What a model takes and how fast it can be, from its configuration alone. Imports no torch."""
