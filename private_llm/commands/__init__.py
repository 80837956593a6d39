"""What each subcommand of `private-llm` does; cli.py only parses and calls."""
