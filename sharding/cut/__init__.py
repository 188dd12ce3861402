"""A partitioned step as programs: stages, micro-batches, gradients, residuals, overlap."""
