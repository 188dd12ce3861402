"""How the groups of a collective lie on a topology, and the rings over the chips of one."""
