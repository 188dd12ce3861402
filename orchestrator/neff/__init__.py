"""The commands on program files: `neff info, dump, unpack, diff, verify, run, export`."""
