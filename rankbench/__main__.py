"""`python -m rankbench`: the same commands as the installed `rankbench`."""

from rankbench.commands.cli import main

if __name__ == "__main__":
    main()
