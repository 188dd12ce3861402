"""What instructions do, one by one, over the bytes on chip (L0), and the checks they pass."""
