"""What the text forms of graphs and kernels share: words, fields, values."""
