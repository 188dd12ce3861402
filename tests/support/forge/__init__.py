"""Files made to harm their reader, and the road each kind of them goes: by seed, in processes of
their own with limits of time and memory. `python -m tests.support.forge` is the long run."""
