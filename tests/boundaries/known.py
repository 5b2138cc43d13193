"""The cells of the general tests that fail today: by test and parameters, the item of the work that mends each.

Each is a strict expected failure, so that whoever mends it takes it off this list. `python -m tests.boundaries.known`
prints the list.
"""

KNOWN: dict[str, dict[str, str]] = {"rate zero": {}}

if __name__ == "__main__":
    for test, cells in KNOWN.items():
        for cell, reason in sorted(cells.items(), key=lambda item: item[1]):
            print(f"{reason}: {test}: {cell}")
