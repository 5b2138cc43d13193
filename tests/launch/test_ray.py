"""Learners on a Ray cluster of several raylets, every one on this machine's loopback interface."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import soundfile
import yaml
from rich.console import Console

import starling
from benchmarks.ray_cluster import RayCluster, ray_cluster
from starling.checkpoint.reader import latest, load
from starling.errors import ConfigError, MissingExtraError, StarlingError
from starling.experiment.following import join
from starling.experiment.following import status as show_status
from starling.experiment.record import read_seen
from starling.launch.messages import Status, decode_file
from tests.launch.ray_job import BATCHES, EPOCHS, make_job

PATIENCE = 150.0


@pytest.fixture(autouse=True)
def without_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners import the script that called `starling.train`, which here would be pytest."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    with ray_cluster() as started:
        yield started


def test_sigterm_ends_forks_of_the_process_that_starts_nodes(ray_head: RayCluster) -> None:
    """Ray's own handler, which they would inherit, drains a node instead."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()


@pytest.fixture
def nodes(ray_head: RayCluster) -> Iterator[RayCluster]:
    """The cluster of all tests, to which this one adds nodes."""
    with ray_head.more_nodes() as cluster:
        yield cluster


class Run:
    """A run in a thread of its own, so that the test can change the cluster meanwhile."""

    def __init__(self, folder: Path, learners: int, address: str, **how: Any) -> None:
        self.experiment = folder / "exp" / "toy"
        self.slow = folder / "slow"
        self.slow.touch()
        self.said = StringIO()
        self.error: BaseException | None = None
        options = {"launch": {"kind": "ray", "address": address}, "engine": {"threads": 1}, **how}
        self._thread = threading.Thread(target=self._train, args=[folder, learners, options], daemon=True)
        self._thread.start()

    def _train(self, folder: Path, learners: int, options: dict[str, Any]) -> None:
        try:
            job = make_job(self.slow)
            starling.train(job, learners, name="toy", exp=folder / "exp", console=Console(file=self.said), **options)
        except StarlingError as error:
            self.error = error

    def wait_until(self, holds: Callable[[Status], bool]) -> Status:
        """Wait until the run's status is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._thread.is_alive():
            file = self.experiment / "status.json"
            if file.exists() and holds(status := decode_file(Status, file.read_bytes())):
                return status
            time.sleep(0.1)
        raise AssertionError(f"{self.error}; the run said:\n{self.said.getvalue()}")

    def end(self) -> None:
        self.slow.unlink(missing_ok=True)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), self.said.getvalue()


def num_training(status: Status) -> int:
    return sum(each.num_steps >= 2 for each in status.learners)


def shown(experiment: Path) -> str:
    """What `starling status` says."""
    output = Console(file=StringIO(), width=200)
    show_status(experiment, False, output)
    assert isinstance(output.file, StringIO)
    return output.file.getvalue()


def assert_all_seen_once(experiment: Path, most_beyond: int = 0) -> None:
    """All mini-batches of the budget, and at most so many beyond it: learners in step end with a whole step."""
    manifest = load(latest(experiment)).manifest
    number = manifest.position.num_done
    assert 0 <= number - EPOCHS * BATCHES <= most_beyond
    seen = Counter(sight.ticket.step for sight in read_seen(experiment / "seen", manifest.position))
    assert seen == Counter(range(number))


def test_a_lost_node_s_learner_comes_back_on_a_new_node_and_everything_is_seen_once(
    nodes: RayCluster, tmp_path: Path
) -> None:
    """One of two raylets is killed half-way, and another one is added: its learner joins there, and one more that
    `starling join` asked for; the run ends well.

    Nothing is left: neither processes nor the file with the run's token.
    """
    lost = nodes.add(num_cpus=1)
    run = Run(tmp_path, 2, nodes.address, on_loss="replace")
    run.wait_until(lambda status: num_training(status) == 2)
    assert (run.experiment / "log" / "run-token").stat().st_mode & 0o777 == 0o600
    nodes.kill(lost)
    status = run.wait_until(lambda status: bool(status.losses))
    assert "was lost with its actor on node 127.0.0.1" in status.losses[0]
    new = nodes.add(num_cpus=2)
    run.wait_until(lambda status: status.generation == 2)
    assert "has joined; 2 learners train now" in run.said.getvalue()
    answers: list[str] = []
    join(run.experiment, 1, answers.append)
    assert answers[0].startswith("joined as learner 2; 3 learners train now")
    status = run.wait_until(lambda status: num_training(status) == 3)
    assert sum(new.node_id[:8] in each.node for each in status.learners) == 2  # either of the first two was lost
    text = shown(run.experiment)
    assert all(each.node in text for each in status.learners) and "gone" not in text
    run.end()
    assert run.error is None, run.said.getvalue()
    assert load(latest(run.experiment)).manifest.world == 3
    assert_all_seen_once(run.experiment)
    logs = sorted(path.name for path in (run.experiment / "log").glob("learner-*"))
    assert logs == ["learner-0.log", "learner-1.log", "learner-2.log"]
    assert not (run.experiment / "log" / "run-token").exists()
    assert not list(run.experiment.glob(".starling-job-*"))


def test_without_a_cluster_there_is_one_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Before anything is written."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    launch = {"kind": "ray", "address": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127.0.0.1:1 to connect to .*ray start --head"):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path / "exp", launch=launch)
    assert not (tmp_path / "exp").exists()


def test_without_ray_there_is_one_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not an ImportError."""
    monkeypatch.setattr("starling.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"launch: ray needs ray: pip install 'starling-asr\[ray\]'"):
        starling.train(make_job(tmp_path / "slow"), 2, exp=tmp_path / "exp", launch="ray")


def test_a_group_of_learners_on_a_node_holds_whole_super_learners(tmp_path: Path) -> None:
    """Otherwise a super-learner's all-reduce would cross nodes."""
    strategy = {"name": "hadpsgd", "per_node": 2}
    launch = {"kind": "ray", "learners_per_node": 3}
    with pytest.raises(ConfigError, match=r"learners_per_node: 3 is not a multiple of 2, the size of a super-learner"):
        starling.train(make_job(tmp_path / "slow"), 6, exp=tmp_path / "exp", strategy=strategy, launch=launch)


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    [
        *("allreduce", "delay-by-one", "delayed", "dpsgd", "adpsgd"),
        *("local-sgd", "bmuf", "slowmo", "diloco", "streaming-diloco", "parameter-server"),
        {"name": "hadpsgd", "per_node": 2},
    ],
    ids=str,
)
def test_the_learners_on_other_nodes_survive_a_lost_node(
    strategy: str | dict[str, Any], cluster: RayCluster, tmp_path: Path
) -> None:
    """Under every strategy that spans nodes: two of four learners are lost at once, and everything is seen once.

    The learners of a super-learner are on one node. A parameter server survives: it is learner 0.
    """
    cluster.add(num_cpus=0)
    nodes = [cluster.add(num_cpus=2) for _ in range(2)]
    run = Run(tmp_path, 4, cluster.address, strategy=strategy)
    status = run.wait_until(lambda status: num_training(status) == 4)
    assert sorted(Counter(each.node for each in status.learners).values()) == [2, 2]
    if isinstance(strategy, dict):
        assert status.learners[0].node == status.learners[1].node != status.learners[2].node
    lost = next(node for node in nodes if node.node_id[:8] not in status.learners[0].node)
    victims = {each.learner_id for each in status.learners if lost.node_id[:8] in each.node}
    killed_at = time.monotonic()
    cluster.kill(lost)
    status = run.wait_until(lambda status: all(status.learners[victim].rank is None for victim in victims))
    assert time.monotonic() - killed_at < 10.0
    # where one learner of a super-learner is lost, the others leave, if they notice that before they are lost, too
    assert {int(loss.split()[1]) for loss in status.losses} <= victims
    assert len(status.losses) == 2 or (isinstance(strategy, dict) and status.losses)
    run.end()
    assert run.error is None, run.said.getvalue()
    assert_all_seen_once(run.experiment, most_beyond=1)  # two are left, perhaps with an odd number of mini-batches


@pytest.mark.soak
def test_a_killed_learner_is_restarted_in_the_place_that_it_had(cluster: RayCluster, tmp_path: Path) -> None:
    """The cluster has no other room: the dead learner's CPU is given back."""
    cluster.add(num_cpus=2)
    run = Run(tmp_path, 2, cluster.address, on_loss="replace")
    run.wait_until(lambda status: num_training(status) == 2)
    victim = next(each for each in learners_below() if each.environ()["RANK"] == "1")
    victim.kill()
    status = run.wait_until(lambda status: status.generation == 2)
    assert "learner 1 was killed by SIGKILL" in status.losses[0]
    run.end()
    assert run.error is None, run.said.getvalue()
    assert_all_seen_once(run.experiment)


@pytest.mark.soak
def test_a_run_survives_the_loss_of_its_server_s_node(cluster: RayCluster, tmp_path: Path) -> None:
    """A worker takes the server's place."""
    nodes = [cluster.add(num_cpus=1) for _ in range(3)]
    run = Run(tmp_path, 3, cluster.address, strategy="parameter-server")
    status = run.wait_until(lambda status: num_training(status) == 3)
    lost = next(node for node in nodes if node.node_id[:8] in status.learners[0].node)
    cluster.kill(lost)
    status = run.wait_until(lambda status: bool(status.losses))
    assert re.search(rf"learner 0 was lost with its actor on node 127.0.0.1 \({lost.node_id[:8]}\)", status.losses[0])
    run.end()
    assert run.error is None, run.said.getvalue()
    assert_all_seen_once(run.experiment)


DRIVER = """
import sys
from pathlib import Path
import starling
from tests.launch.ray_job import make_job
if __name__ == "__main__":
    how = {"launch": {"kind": "ray", "address": sys.argv[1]}, "engine": {"threads": 1}, "checkpoints": {"every": 10}}
    starling.train(make_job(Path("slow")), 2, name="toy", **how)
"""


@pytest.mark.soak
def test_learners_on_all_nodes_end_when_the_driver_dies(cluster: RayCluster, tmp_path: Path) -> None:
    """Within 10 s of a kill -9. A driver on another cluster, which shares the folder, resumes the run."""
    for _ in range(2):
        cluster.add(num_cpus=1)
    (tmp_path / "slow").touch()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    driver = subprocess.Popen(
        [sys.executable, str(script), cluster.address], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    deadline, status_file = time.monotonic() + PATIENCE, tmp_path / "exp" / "toy" / "status.json"
    while not status_file.exists() or not decode_file(Status, status_file.read_bytes()).saved:
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    learners = learners_below()
    assert len(learners) == 2
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(learners, timeout=10.0)
    assert not alive
    with ray_cluster() as other:
        other.add(num_cpus=2)
        run = Run(tmp_path, 2, other.address, resume=tmp_path / "exp" / "toy")
        run.wait_until(lambda status: num_training(status) == 2)
        run.end()
        assert run.error is None, run.said.getvalue()
    assert_all_seen_once(run.experiment)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_preparation_survives_a_lost_node_and_a_killed_command_continues(cluster: RayCluster, tmp_path: Path) -> None:
    """With `executor=ray`: a raylet is killed, then the command, and the next one does only what is left. Every byte is
    that of a preparation in one process."""
    rows = ["id\tspeaker\taudio\ttext"]
    for number in range(300):
        noise = np.random.default_rng(number).standard_normal(6 * 16000) * 0.1
        soundfile.write(tmp_path / f"u{number}.wav", noise, 16000)
        rows.append(f"u{number}\ts{number % 7}\tu{number}.wav\tword{number}")
    (tmp_path / "corpus.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    corpus = {"kind": "tsv", "path": "corpus.tsv", "sets": {"train": {}}}
    data = {"corpus": corpus, "sampling_rate": 8000, "shard_size": 5, "valid": None, "test": []}
    for name in ("ray", "one"):
        recipe = {"name": "r", "budget": {"epochs": 1}, "data": {**data, "folder": f"data/{name}"}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    cluster.add(num_cpus=1)
    lost = cluster.add(num_cpus=1)

    def prepare(name: str, *more: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "starling", "prepare", f"{name}.yaml", *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def finished() -> dict[str, int]:
        found = {}
        for path in tmp_path.glob("data/ray/train.partial/*/stages/*.json"):
            with suppress(FileNotFoundError):  # at the end, all are removed
                found[path.name] = path.stat().st_mtime_ns
        return found

    on_ray = ("executor=ray", f"launch.address={cluster.address}")
    first = prepare("ray", *on_ray)
    try:
        for happens in (lambda: cluster.kill(lost), first.kill):
            enough, deadline = len(finished()) + 3, time.monotonic() + PATIENCE
            while len(finished()) < enough:
                assert first.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            happens()
    finally:
        first.kill()
        first.wait()
    before = finished()
    assert len(before) < 60
    with prepare("ray", *on_ray) as second, prepare("one") as one:
        kept: dict[str, int] = {}
        while second.poll() is None:
            found = finished()
            kept = found if len(found) >= len(kept) else kept
            time.sleep(0.05)
    assert second.returncode == one.returncode == 0
    assert before.items() <= kept.items()
    sets = [tmp_path / "data" / name / "train" for name in ("ray", "one")]
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in sets]
    assert names[0] == names[1] and len(names[0]) > 120
    for name in names[0]:
        if (sets[0] / name).is_file():
            assert (sets[0] / name).read_bytes() == (sets[1] / name).read_bytes()


def learners_below() -> list[psutil.Process]:
    """The learner processes on the cluster's nodes."""
    return [
        each
        for each in psutil.Process().children(recursive=True)
        if each.status() != psutil.STATUS_ZOMBIE and "starling.experiment.job_process" in each.cmdline()
    ]


@pytest.mark.soak
def test_auto_measures_the_cluster_and_trains_there(cluster: RayCluster, tmp_path: Path) -> None:
    """`strategy: auto` starts its measuring learners where the run's own start."""
    cluster.add(num_cpus=2)
    run = Run(tmp_path, 2, cluster.address, strategy="auto")
    run.end()
    assert run.error is None, run.said.getvalue()
    assert "2 learners measure" in run.said.getvalue()
    assert (run.experiment / "auto.yaml").exists()
    assert_all_seen_once(run.experiment)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_survives_a_lost_node_and_gets_another_one(cluster: RayCluster, tmp_path: Path) -> None:
    """As a user starts it: WER at most 10 %, and `starling audit` finds nothing."""
    cluster.add(num_cpus=2)
    lost = cluster.add(num_cpus=1)
    cluster.add(num_cpus=1)
    starling_command = str(Path(sys.executable).parent / "starling")
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    options = ["learners=4", "on_loss=replace", f"launch={{kind: ray, address: '{cluster.address}'}}"]
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(
            [starling_command, "train", str(recipe), *options], cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT
        )
    experiment, killed_at = tmp_path / "exp" / "demo", 0
    try:
        while run.poll() is None:
            time.sleep(0.5)
            if not killed_at and (experiment / "status.json").exists():
                status = decode_file(Status, (experiment / "status.json").read_bytes())
                if (num_steps := sum(each.num_steps for each in status.learners)) > 4000:
                    cluster.kill(lost)
                    cluster.add(num_cpus=1)
                    killed_at = num_steps
    finally:
        run.kill()
    text = (tmp_path / "said").read_text()
    assert run.returncode == 0, text
    assert 0.3 < killed_at / load(latest(experiment)).manifest.position.num_done < 0.7
    assert "was lost with its actor on node" in text and "has joined; 4 learners train now" in text
    rates = [float(rate) for rate in re.findall(r"%WER ([\d.]+) ", text)]
    assert rates and rates[-1] <= 10.0, text
    audit = subprocess.run([starling_command, "audit", "exp/demo"], cwd=tmp_path, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_loop_in_actors_survives_a_lost_node_and_its_learner_joins_again_elsewhere(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The example: Ray starts the lost actor on a node that was added, and all end with one model."""
    nodes = [cluster.add(num_cpus=1) for _ in range(3)]
    example = Path(__file__).parents[2] / "examples" / "ray_actors.py"
    command = [sys.executable, str(example), "--learners", "3", "--steps", "6000"]
    with (tmp_path / "said").open("w") as said:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        run = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    try:
        await_output(cluster, "step 100,", run)
        learners = [each for each in psutil.process_iter() if "ray::Learner" in " ".join(each.cmdline())]
        assert len(learners) == 3
        (first,) = (each.ppid() for each in learners if each.children())  # beside learner 0 is the coordinator
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in nodes[1:]}
        lost = next(each.ppid() for each in learners if each.ppid() != first and each.ppid() in raylets)
        cluster.kill(raylets[lost])
        await_output(cluster, ": 2 learners", run)
        cluster.add(num_cpus=1)
        await_output(cluster, ": 3 learners", run)
        assert run.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
    finally:
        run.kill()
        run.wait()
    found = re.findall(
        r"^accuracy (0\.9\d+|1\.0+) with 3 learners under adpsgd$", (tmp_path / "said").read_text(), re.M
    )
    assert len(found) == 3 and len(set(found)) == 1, (tmp_path / "said").read_text()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_loop_under_ray_train_survives_a_killed_worker_which_is_replaced_and_joins(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The example: the others go on alone until then, and all end with one model."""
    pytest.importorskip("pyarrow", reason="the extra `train` of Ray is not installed")
    cluster.add(num_cpus=4)
    example = Path(__file__).parents[2] / "examples" / "ray_train.py"
    command = [sys.executable, str(example), "--learners", "3", "--steps", "8000"]
    with (tmp_path / "said").open("w") as said:
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        run = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    try:
        await_output(cluster, "step 100,", run)
        workers = [each for each in psutil.process_iter() if "RayTrainWorker" in " ".join(each.cmdline())]
        assert len(workers) == 3
        next(each for each in workers if not each.children()).kill()  # beside learner 0 is the coordinator
        await_output(cluster, ": 2 learners", run)
        await_output(cluster, ": 3 learners", run)
        assert run.wait(PATIENCE) == 0, (tmp_path / "said").read_text()
    finally:
        run.kill()
        run.wait()
    logs = "".join(file.read_text(errors="replace") for file in cluster.logs.glob("worker-*.out"))
    found = re.findall(r"^accuracy (0\.9\d+|1\.0+) with 3 learners under adpsgd$", logs, re.M)
    assert found and len(set(found)) == 1, logs


def await_output(cluster: RayCluster, text: str, run: subprocess.Popen[bytes]) -> None:
    """Wait until a worker of the cluster has written `text`."""
    deadline = time.monotonic() + PATIENCE
    while not any(text in file.read_text(errors="replace") for file in cluster.logs.glob("worker-*.out")):
        assert run.poll() is None and time.monotonic() < deadline, text
        time.sleep(0.1)
