"""What the text forms of graphs and regions share: words, fields, values."""
