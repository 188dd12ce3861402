"""neuronx-cc's own command line: flags, version profiles, logs, exit codes.

`compile_command.py` is the command.
"""
