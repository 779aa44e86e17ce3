"""`python -m baton`: the same as the `baton` command."""

from baton.cli.app import main

if __name__ == "__main__":
    main()
