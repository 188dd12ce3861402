"""Work handed over: jobs submitted to a Ray cluster, jobs that only compile, and graphs that a
user's script leaves to be compiled."""
