"""A run as one page, and two runs side by side."""
