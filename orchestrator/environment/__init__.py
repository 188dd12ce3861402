"""What the vendor's environment variables say: one table of them, and how commands read it."""
