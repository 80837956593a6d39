"""`python -m private_llm`: the command line."""

from private_llm_cli.app import main

if __name__ == "__main__":
    main()
