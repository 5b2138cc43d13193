"""The learners of the contract's cases on the code path of an accelerator, with gloo in NCCL's place.

Means travel by the groups that would be NCCL's, and every use of a group by a second thread is an error: over NCCL two
threads on one communicator have no common order, and corrupt weights in silence.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from starling.engines.processes import process_group as membership_group
from starling.engines.processes.place import Place
from tests.contract.learner_process import main

users: dict[Any, set[int]] = {}
"""The threads that used each group for a collective of the backend."""


def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
    def watching(*args: Any, group: Any = None, **options: Any) -> Any:
        threads = users.setdefault(group, set())
        threads.add(threading.get_ident())
        if len(threads) > 1:
            raise ValueError("two threads share a communicator")
        return collective(*args, group=group, **options)

    return watching


if __name__ == "__main__":
    membership_group.BACKEND = "gloo"
    Place.has_own_device = lambda *_: True  # type: ignore[method-assign]
    dist.all_reduce = watched(dist.all_reduce)
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
