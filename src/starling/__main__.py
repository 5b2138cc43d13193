"""`python -m starling` runs the command line `starling`."""

from starling.cli import main

if __name__ == "__main__":
    main()
