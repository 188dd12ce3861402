"""What a question depends on besides its job file: files read, environment, traced steps."""
