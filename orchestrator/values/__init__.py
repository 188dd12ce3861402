"""Value runs of jobs: where ranks live, checkpoints, recovery."""
