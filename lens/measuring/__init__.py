"""Numbers: metric definitions, profiles, comparisons."""
