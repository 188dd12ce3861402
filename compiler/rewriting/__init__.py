"""Graph rewrites: what one is, the driver that runs all of them, and what they promise."""
