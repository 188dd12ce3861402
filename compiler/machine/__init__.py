"""The machines: what `targets/*.json` say, with sources, and machine files of users."""
