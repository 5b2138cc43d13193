"""Lets this environment see all packages of another one, including editable ones: `see_packages_of ENVIRONMENT`."""

import sys
import sysconfig
from pathlib import Path


def main(other: Path) -> None:
    theirs = sysconfig.get_path("purelib", vars={"base": str(other)})
    ours = Path(sysconfig.get_path("purelib"))
    (ours / "seen.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
