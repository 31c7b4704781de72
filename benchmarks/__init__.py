"""Measurements: each claim of speed is a ratio of two commands that ran side by side, in turn, in one run."""
