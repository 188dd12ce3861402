"""What a question depends on besides its job file: files read, and the environment."""
