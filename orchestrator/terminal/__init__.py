"""What users see and get: tables, plots, files."""
