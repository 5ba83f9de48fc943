"""Results become pictures and files; numbers in, no torch."""
