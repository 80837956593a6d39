"""`python -m private_llm`: the command line."""

from private_llm.cli import main

if __name__ == "__main__":
    main()
