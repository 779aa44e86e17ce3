"""Run the `baton` command as `python -m baton`."""

from baton.cli.app import main

if __name__ == "__main__":
    main()
