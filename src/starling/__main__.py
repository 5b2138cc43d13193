"""`python -m starling` is `starling`."""

from starling.cli import main

if __name__ == "__main__":
    main()
