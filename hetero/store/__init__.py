"""Packed experts on disk: files of them, and a backend that holds some in RAM and reads the rest."""
