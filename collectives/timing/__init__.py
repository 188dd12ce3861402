"""How long a collective takes: what it loads, the time of that, what a runtime adds."""
