"""The command and its jobs: from what users say to files, values, times and reports."""
