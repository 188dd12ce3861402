"""Graph passes: folding, CSE, dead code, and the pipeline that runs them."""
