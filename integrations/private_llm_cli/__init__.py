"""The command line `private-llm` and its benchmarks, above the library and its HuggingFace integration."""
