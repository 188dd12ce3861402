"""The road of a job: build, time, numbers, and the answers that are kept."""
