"""Pipeline stages: layer loops split by trips, then every op and value placed on stages.

docs/design/0031-pipeline.md has the reasons. `loops.py` splits, and keeps the meaning of one
program; placing and cutting build on it.
"""
