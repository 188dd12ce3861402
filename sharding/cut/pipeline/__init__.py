"""Pipeline stages: layers shared out before partitioning, the cut step divided after it.

`assignment.py` says which layers belong to which part, `unstack.py` and `loops.py` make every part
values and loops of its own. `op_placement.py`, `update.py` and `partial_sums.py` place ops,
`divide.py` makes the programs and transfers of every stage, `schedules.py` their order.
docs/design/0031-pipeline.md has the reasons.
"""
