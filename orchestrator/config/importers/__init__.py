"""Training configurations of other projects, read as jobs: one table of fields per project."""
