"""Networks of one's own as checked data, and those of the literature."""
