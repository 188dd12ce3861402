"""The simulated cluster: runs NEFF files in values and in time."""
