"""The commands on program files: `neff info, dump, diff, verify, run, export`."""
