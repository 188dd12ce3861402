"""From one training step to what every core computes and sends."""
