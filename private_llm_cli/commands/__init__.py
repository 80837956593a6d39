"""What each subcommand of `private-llm` does; app.py only parses and calls."""
