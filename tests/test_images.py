"""The image and the Kubernetes Job: what they install is pinned, what they run works, and the page shows both.

`.ci/smoke` follows the whole Dockerfile, which takes minutes.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from starling import errors
from starling.engines.processes import run_token
from starling.engines.processes.place import NODE_CPUS
from starling.launch.rendezvous import REQUIRED, place_of_environment
from starling.timeouts import STOP
from tests.code_blocks import code_blocks
from tests.mounts import run_with, small_disk
from tests.runs.conftest import Tree, songs, tree
from tests.test_documents import environment
from tools.image import COMMANDS, FOR_DEBIAN, Image, Instruction, filled, instructions

__all__ = ["songs", "tree"]

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "images" / "Dockerfile").read_text(encoding="utf-8")
DOCKERFILE = instructions(TEXT)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
ENTRYPOINT = ROOT / "images" / "entrypoint"
PAGE = [block for block in code_blocks(ROOT / "docs" / "running.md") if "docker " in block.text]
SERVICE, JOB = yaml.safe_load_all((ROOT / "examples" / "indexed_job.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
(LEARNER,) = POD["containers"]
VARIABLES: dict[str, dict[str, Any]] = {each["name"]: each for each in LEARNER["env"]}


def named(name: str) -> list[str]:
    """What follows the instructions of a name."""
    return [each.text for each in DOCKERFILE if each.name == name]


def python_of_the_image() -> str:
    (version,) = re.findall(r"^PYTHON=(\d+\.\d+\.\d+)$", "\n".join(named("ARG")), re.MULTILINE)
    return str(version)


def test_every_stage_has_the_same_python_which_the_package_supports() -> None:
    """An exact release on a named release of Debian; with it, every extra installs all of its packages."""
    assert {text.split()[0] for text in named("FROM")} == {"python:${PYTHON}-slim-trixie"}
    version = python_of_the_image()
    assert version in SpecifierSet(PROJECT["project"]["requires-python"])
    minor = ".".join(version.split(".")[:2])
    assert f"Programming Language :: Python :: {minor}" in PROJECT["project"]["classifiers"]
    for lines in PROJECT["project"]["optional-dependencies"].values():
        for requirement in map(Requirement, lines):
            assert requirement.marker is None or requirement.marker.evaluate({"python_version": minor}), requirement


def test_all_that_the_image_installs_is_pinned() -> None:
    """By constraints.txt, which has the version of hatchling that pyproject.toml asks for."""
    commands = re.findall(r"\bpip install .*", "\n".join(named("RUN")))
    assert len(commands) == 3
    for command in commands:
        assert "--constraint constraints.txt" in command
        plain = re.sub(r'--(?:constraint|index-url) \S+|--\S+|"[^"]*"|\$PACKAGES', "", command).split()[2:]
        assert {name.lower() for name in plain} <= {name.lower() for name in PINNED}
    assert PROJECT["build-system"]["requires"] == [f"hatchling=={PINNED['hatchling']}"]
    assert all(PINNED[name] == version for name, version in re.findall(r"([\w-]+)==([\w.]+)", TEXT))


def test_the_extras_of_the_image_exist() -> None:
    """The default of the build argument, and what the page names."""
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    chosen = re.findall(r"\bEXTRAS=([\w,]+)", TEXT + page)
    assert len(chosen) > 1
    assert chosen[0] == "all"
    assert {extra for extras in chosen for extra in extras.split(",")} <= set(errors.EXTRAS) | {"all"}


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path through: the last line that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line in ("*", path) or line == f"!{path}":
            sent = line.startswith("!")
    return sent


def test_the_builder_gets_what_the_image_copies_and_nothing_else() -> None:
    """Neither corpora nor environments nor experiments of the checkout."""
    copied = [source for text in named("COPY") if "--from" not in text for source in text.split()[:-1]]
    assert [source for source in copied if not (is_sent(source) and (ROOT / source).exists())] == []
    assert not any(is_sent(other) for other in ("exp", "data", ".venv", ".git", "tests", "dist"))


def test_the_container_is_not_root_and_its_first_process_reaps_others() -> None:
    """Kubernetes checks `runAsNonRoot` only for users that are numbers."""
    (user,), (workdir,) = named("USER"), named("WORKDIR")[1:]
    assert (user, workdir) == ("1000:1000", "/work")
    assert named("ENTRYPOINT") == ['["tini", "--", "entrypoint"]']
    assert "install --yes --no-install-recommends tini" in TEXT and "useradd --create-home --uid 1000" in TEXT
    last = DOCKERFILE[[each.name for each in DOCKERFILE].index("USER") :]
    assert not any(each.name in ("RUN", "COPY") for each in last)


@pytest.mark.parametrize(
    ("arguments", "becomes"),
    [
        (["--help"], ["starling", "--help"]),
        ([], ["starling"]),
        (["starling", "train", "a recipe.yaml"], ["starling", "train", "a recipe.yaml"]),
        (["torchrun", "--help"], ["torchrun", "--help"]),
    ],
)
def test_the_entry_point_completes_options_and_runs_everything_else(
    arguments: list[str], becomes: list[str], tmp_path: Path
) -> None:
    """Arguments keep their spaces."""
    for name in ("starling", "torchrun"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n', encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run([ENTRYPOINT, *arguments], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == becomes


def test_a_dockerfile_is_read_as_docker_reads_it() -> None:
    """Continuation lines, comments between them, and both ways to write a variable."""
    text = "# a comment\nFROM base AS build\nRUN one && \\\n# why two\n    two\nENV A=$B:${C}\n"
    assert instructions(text) == [
        Instruction("FROM", "base AS build"),
        Instruction("RUN", "one && two"),
        Instruction("ENV", "A=$B:${C}"),
    ]
    assert filled("$B:${C}", {"B": "b", "C": "c"}) == "b:c"
    with pytest.raises(KeyError):
        filled("$D", {"B": "b"})


SMALL = """
ARG WORD=default
FROM base AS build
WORKDIR /build
COPY LICENSE ./
ARG WORD=other
RUN python -c "import sys; print(sys.prefix)" > prefix && test -f LICENSE && echo "$WORD" > /opt/word
RUN apt-get install nothing
FROM base
COPY --from=build /opt/word /opt/word
ENV PATH=/opt/bin:$PATH
ENTRYPOINT ["tini", "--", "entrypoint"]
"""


def test_a_dockerfile_is_followed_in_a_folder(tmp_path: Path) -> None:
    """Its Python is an empty environment; each stage has its own variables; what is for Debian is skipped."""
    (tmp_path / "opt").mkdir()
    image = Image(tmp_path, {"WORD": "given"}, has_pip=False)
    image.build(SMALL)
    assert (tmp_path / "build" / "prefix").read_text(encoding="utf-8").strip() == str(tmp_path / "base")
    assert (tmp_path / "opt" / "word").read_text(encoding="utf-8") == "given\n"
    assert image.skipped == ["apt-get install nothing"]
    assert image.variables["PATH"].startswith(f"{tmp_path}/opt/bin:{tmp_path}/base/bin:")
    assert "WORD" not in image.variables
    with pytest.raises(subprocess.CalledProcessError):
        image.build("FROM base\nRUN python -c 'import torch'")


def test_smoke_follows_the_whole_dockerfile() -> None:
    """It skips only two instructions, and tries the commands that the page shows."""
    smoke = (ROOT / ".ci" / "smoke").read_text(encoding="utf-8")
    assert '-m tools.image "$folder/image"' in smoke
    assert [text.split()[0] for text in named("RUN") if text.split()[0] in FOR_DEBIAN] == ["apt-get", "useradd"]
    shown = "".join(block.text for block in PAGE)
    assert all(f"starling {' '.join(command)}" in shown for command in COMMANDS[:3])


def test_the_page_builds_with_arguments_that_the_dockerfile_has() -> None:
    """And names the driver that the build of torch needs."""
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    used = set(re.findall(r"--build-arg '?(\w+)=", page + TEXT))
    assert used == {"TORCH", "EXTRAS", "PACKAGES"}
    assert used <= {each.partition("=")[0] for each in named("ARG")}
    assert set(re.findall(r"docker build --file (\S+)", page)) == {"images/Dockerfile"}
    (driver,) = re.findall(r"\b580[\d.]*\d", TEXT)
    assert driver in page


@pytest.mark.wide
def test_learners_of_one_machine_need_no_shared_memory_file_system(tmp_path: Path) -> None:
    """A container has 64 MB of it; here are 64 kB, for a model of 5 MB that two learners average in shared memory."""
    (tmp_path / "job.py").write_text(TWO_LEARNERS, encoding="utf-8")
    program = f"import subprocess, sys; subprocess.run([sys.executable, 'job.py'], cwd={str(tmp_path)!r}, check=True)"
    said = run_with(small_disk(Path("/dev/shm"), "64k"), program)
    assert "finished 20 mini-batches" in said


TWO_LEARNERS = """
from functools import partial
import torch
import starling

data = torch.utils.data.TensorDataset(torch.randn(200, 40_000))


def loss(model, batch):
    return model(batch[0]).mean()


job = starling.Job(
    starling.DataWorkload(partial(torch.nn.Linear, 40_000, 32), loss, data, batch_size=2),
    strategy=starling.STRATEGIES["adpsgd"],
    budget=starling.Budget(steps=20),
    make_optimizer=partial(torch.optim.SGD, lr=0.1),
)
if __name__ == "__main__":
    starling.train(job, learners=2, name="job")
    print("finished 20 mini-batches")
"""


def test_each_pod_is_the_learner_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is on its machine; all variables are such that a learner reads."""
    assert set(VARIABLES) == {*REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", run_token.VARIABLE, NODE_CPUS}
    index = VARIABLES["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert VARIABLES[NODE_CPUS]["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}
    assert set(VARIABLES[run_token.VARIABLE]["valueFrom"]) == {"secretKeyRef"}
    for name, each in VARIABLES.items():
        if "value" in each:
            assert isinstance(each["value"], str), f"Kubernetes refuses {name}, which is not a text"
            monkeypatch.setenv(name, each["value"])
    for rank in range(JOB["spec"]["completions"]):
        monkeypatch.setenv("RANK", str(rank))
        place = place_of_environment(may_join=False)
        assert (place.rank, place.world) == (rank, JOB["spec"]["parallelism"])
        assert (place.local_rank, place.local_world) == (0, 1)


def test_the_store_has_a_name_in_the_headless_service() -> None:
    """Pods of an Indexed Job are called after the Job and their index."""
    name = JOB["metadata"]["name"]
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("v1", "Service")
    assert SERVICE["spec"]["clusterIP"] == "None" or SERVICE["spec"]["clusterIP"] is None
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    manifest = (ROOT / "examples" / "indexed_job.yaml").read_text(encoding="utf-8")
    assert f"MASTER_ADDR, value: {name}-0.{POD['subdomain']}" in manifest


def test_the_job_restarts_pods_and_gives_up_where_that_is_useless() -> None:
    """Pods may save before they are killed; a wrong recipe, bad data and a diverged run do not run again."""
    assert (JOB["apiVersion"], JOB["kind"], JOB["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert POD["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert POD["terminationGracePeriodSeconds"] > STOP
    ignored, fatal = JOB["spec"]["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    useless = {each.exit_code for each in (errors.ConfigError, errors.NonFiniteError, errors.DataError)}
    assert fatal == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(useless)}}
    assert JOB["spec"]["backoffLimit"] >= JOB["spec"]["completions"]
    mounts = {each["mountPath"]: each["name"] for each in LEARNER["volumeMounts"]}
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts[LEARNER["workingDir"]]]
    assert "command" not in LEARNER  # it would replace the entry point of the image


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.soak
@pytest.mark.parametrize(("lost", "number", "ends"), [(1, signal.SIGKILL, 3), (0, signal.SIGTERM, 143)])
def test_the_pods_of_a_job_resume_after_the_loss_of_one(
    lost: int, number: signal.Signals, ends: int, tree: Tree, tmp_path: Path
) -> None:
    """Two pods run the manifest's command, and each is started again after it has failed, as a Job does."""
    steps = 600
    recipe = {**tree, "exp": "exp", "budget": {"steps": steps}, "checkpoints": {"every": 50}, "strategy": "adpsgd"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    checkpoints, exits, deadline = tmp_path / "exp" / "speech" / "checkpoints", [], time.monotonic() + 240
    values = {name: each["value"] for name, each in VARIABLES.items() if "value" in each}
    values |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), run_token.VARIABLE: "secret"}

    def start(rank: int) -> subprocess.Popen[bytes]:
        said = (tmp_path / f"{rank}.log").open("ab")
        pod = {**environment(), **values, "RANK": str(rank), NODE_CPUS: "1"}
        return subprocess.Popen(LEARNER["args"], cwd=tmp_path, env=pod, stdout=said, stderr=said)

    pods, is_lost = {rank: start(rank) for rank in range(2)}, False
    try:
        while pods and time.monotonic() < deadline:
            if not is_lost and list(checkpoints.glob("step-*[0-9]/manifest.json")):
                pods[lost].send_signal(number)
                is_lost = True
            for rank, pod in list(pods.items()):
                if pod.poll() is not None:
                    exits.append(pods.pop(rank).returncode)
                    if exits[-1] != 0:
                        pods[rank] = start(rank)
            time.sleep(0.02)
    finally:
        for pod in pods.values():
            pod.kill()
    said = "".join((tmp_path / f"{rank}.log").read_text(encoding="utf-8") for rank in range(2))
    assert not pods, said
    assert ends in exits and exits[-2:] == [0, 0], said
    assert re.search(r"^exp/speech/checkpoints/step-\d+/manifest.json$", said, re.MULTILINE), said
    assert [path.name for path in (tmp_path / "exp").iterdir() if path.is_dir()] == ["speech"]
    assert (checkpoints / f"step-{steps:08}").is_dir(), said


def test_the_shell_can_read_what_pods_run() -> None:
    """The variable `resume` is empty at the first start."""
    shell, flag, script = LEARNER["args"]
    assert (shell, flag) == ("sh", "-c")
    assert shutil.which(shell) and sys.platform != "win32"
    checked = subprocess.run([shell, "-n", flag, script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert script.splitlines()[-1].startswith("exec starling train ")
