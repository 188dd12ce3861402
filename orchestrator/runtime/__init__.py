"""What stands in for the vendor's runtime and its tools: cores that processes hold, how runs end,
and what neuron-ls, neuron-top, neuron-monitor and neuron-profile show."""
