"""The cells of the general tests that fail today: by test and parameters, the item of the work that mends each.

Each is a strict expected failure, so that whoever mends it takes it off this list. `python -m tests.boundaries.known`
prints the list.
"""

import sys

KNOWN: dict[str, dict[str, str]] = {"rate zero": {}}

if __name__ == "__main__":
    for test, cells in KNOWN.items():
        for cell, reason in sorted(cells.items(), key=lambda item: item[1]):
            sys.stdout.write(f"{reason}: {test}: {cell}\n")
