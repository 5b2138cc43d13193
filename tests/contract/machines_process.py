"""The learners of the contract's cases as if they were on several machines: on `four`, or two each on `two`."""

import json
import os
import sys
from pathlib import Path

from starling.engines.processes import links
from tests.contract.learner_process import main

if __name__ == "__main__":
    alone = sys.argv[1] == "four"
    links._machine = lambda: None if alone else f"machine {int(os.environ['RANK']) // 2}"
    main(json.loads(sys.argv[2]), Path(sys.argv[3]))
