"""What knows nothing of compiling: intervals, walks, rules for data from files, child processes."""
