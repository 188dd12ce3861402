"""What is done to a step before it is partitioned, and undone after."""
