"""What a core holds: named buffers, scratch, and what to change where it does not fit."""
