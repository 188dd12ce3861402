"""Verbs of the command that need no job."""
