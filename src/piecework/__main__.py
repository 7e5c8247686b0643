"""Run the command line as `python -m piecework`, which is how a launcher of several ranks starts it."""

from piecework.cli.main import main

if __name__ == "__main__":
    main()
