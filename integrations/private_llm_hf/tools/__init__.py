"""What a model costs and where it differs: estimates, comparisons, trials."""
