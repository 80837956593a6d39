"""Evaluation on long prompts, in plaintext: made tasks, perplexity after a long text, LongBench and its metrics."""
