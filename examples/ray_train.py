"""The loop of `surviving.py` under Ray Train, which replaces a lost worker alone; the worker joins the others.

    python examples/ray_train.py --learners 4 --strategy adpsgd --steps 1500

Runs on the cluster of RAY_ADDRESS, or on this machine. The node of learner 0 holds the store: all end if it is lost.
"""

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig, TorchTrainer


def free_port() -> tuple[str, int]:
    """The address of this worker's node, and a port of it."""
    with socket.socket() as any_socket:
        any_socket.bind(("", 0))
        return ray.util.get_node_ip_address(), any_socket.getsockname()[1]


def set_place(address: str, port: int) -> None:
    context = ray.train.get_context()
    place = {"RANK": context.get_world_rank(), "WORLD_SIZE": context.get_world_size()}
    place |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


class LearnerBackend(Backend):
    """Each worker is a replica group of its own, which Ray Train restarts without the others."""

    has_replica_groups = True
    place: tuple[str, int] | None = None

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called for all workers when the run begins, and for each worker that replaces a lost one."""
        self.place = self.place or worker_group.execute_single(0, free_port)
        worker_group.execute(set_place, *self.place)


class Learners(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return LearnerBackend


def train(config: dict[str, Any]) -> None:
    import surviving

    surviving.main(config["strategy"], config["steps"])


def main(learners: int, strategy: str, steps: int) -> None:
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    trainer = TorchTrainer(
        train,
        train_loop_config={"strategy": strategy, "steps": steps},
        torch_config=Learners(),
        scaling_config=ScalingConfig(num_workers=learners),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--strategy", default="adpsgd", help="a name that `starling strategies` lists")
    parser.add_argument("--steps", type=int, default=200, help="number of steps of the run")
    given = parser.parse_args()
    main(given.learners, given.strategy, given.steps)
