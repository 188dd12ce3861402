"""Algorithms: each file says in which steps members send, one row of `table.py` each; schedules and
loads follow from these steps.
"""
