"""What a set of gradients holds (finite, norm, largest magnitude), widened or unscaled on the way."""
