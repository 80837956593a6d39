"""Weights on their way: checkpoints, calibration, shares in files, and what all agree upon."""
