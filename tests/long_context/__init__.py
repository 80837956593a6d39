"""Long prompts, their metrics, windows of text and LongBench."""
