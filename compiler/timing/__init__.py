"""How long compiled code takes on one core: its instructions through the queues of its engines."""
