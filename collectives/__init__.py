"""What is communicated between cores, over what, in which steps, and how long it takes."""
