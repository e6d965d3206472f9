"""What a set of gradients holds (finite, norm, largest magnitude), unscaled on the way."""
