"""State -> distribution over the vocabulary: lenses, projection and their results."""
