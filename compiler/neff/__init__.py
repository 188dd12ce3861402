"""The files of compiled programs: written, read back and checked, alone and as a bundle."""
