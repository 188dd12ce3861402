"""What users say: job files, flags, models, machines' settings, prices."""
