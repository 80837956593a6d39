"""What each subcommand of `private-llm` does once its options are parsed."""
