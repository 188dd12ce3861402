"""Algorithms: each file turns orders of positions into the phases of a `Schedule`."""
