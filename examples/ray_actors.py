"""The loop of `surviving.py` in Ray actors. Ray restarts a lost actor, on another node if necessary, and the actor
joins.

    python examples/ray_actors.py --learners 4 --strategy adpsgd --steps 1500

Runs on the cluster of RAY_ADDRESS, or on this machine. The node of learner 0 holds the store: all end if it is lost.
"""

import argparse
import os
import socket
from pathlib import Path

import ray


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)  # Ray repeats `train` with the same arguments
class Learner:
    def free_port(self) -> tuple[str, int]:
        """The address of this actor's node, and a port of it."""
        with socket.socket() as any_socket:
            any_socket.bind(("", 0))
            return ray.util.get_node_ip_address(), any_socket.getsockname()[1]

    def train(self, rank: int, world: int, address: str, port: int, strategy: str, steps: int) -> str:
        place = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": address, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        import surviving

        return surviving.main(strategy, steps)


def main(learners: int, strategy: str, steps: int) -> None:
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    actors = [Learner.remote() for _ in range(learners)]
    address, port = ray.get(actors[0].free_port.remote())
    trained = [actor.train.remote(rank, learners, address, port, strategy, steps) for rank, actor in enumerate(actors)]
    print(*ray.get(trained), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--strategy", default="adpsgd", help="a name that `starling strategies` lists")
    parser.add_argument("--steps", type=int, default=200, help="number of steps of the run")
    given = parser.parse_args()
    main(given.learners, given.strategy, given.steps)
