"""Changes of a job: in the command line's words, from where it stands, and what is worth trying."""
