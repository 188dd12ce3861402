"""What a collective does to arrays: schedules run on them."""
