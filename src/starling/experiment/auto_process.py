"""The process of a learner that measures for `strategy: auto`: `auto_process JOB OUTPUT`."""

import sys
from pathlib import Path

from starling.experiment.auto import measure_as_learner

if __name__ == "__main__":
    measure_as_learner(Path(sys.argv[1]), Path(sys.argv[2]))
