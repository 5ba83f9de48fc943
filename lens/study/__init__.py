"""Experiments: matched twins, trained to tell what untying does and nothing else."""
