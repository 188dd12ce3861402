"""Units of work and where they run: executors, the service that feeds them, what a failure costs.

`units.py` says what a unit is, `executor.py` the protocol, `service.py` is the entrance.
"""
