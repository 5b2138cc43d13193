"""Checkpoints appear whole or not at all, are checked when read, and can be resumed."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starling.checkpoint.files import remove_partial
from starling.checkpoint.reader import checkpoints_in, latest, load
from starling.checkpoint.state import MEMBERSHIP_PREFIX, OWN_PREFIX, LearnerState, ShardState, decode_state
from starling.checkpoint.writer import CheckpointWriter
from starling.errors import CheckpointError, ProtocolError
from starling.strategies import STRATEGIES
from starling.strategies.allreduce import AllReduceOptions
from starling.strategies.diloco import DiLoCoOptions
from starling.workload import Position, Ticket

DILOCO, OTHER = (STRATEGIES["diloco"].described(DiLoCoOptions(every=every)) for every in (100, 50))
"""A strategy with its options, as a checkpoint names it, and the same with others."""


def write_model(folder: Path, weights: Tensor, buffers: dict[str, Tensor]) -> None:
    """A model file with the consensus."""
    folder.mkdir()
    save_file({"weights": weights, **buffers}, folder / "model.safetensors")


def state(
    rank: int,
    world: int,
    position: Ticket,
    weights: list[float] | None = None,
    minutes: float = 1.5,
    outstanding: tuple[Ticket, ...] = (),
) -> LearnerState:
    """The state of a learner with momentum and a buffer of its own."""
    parameter = torch.nn.Parameter(torch.tensor(weights or [float(rank), 1.0, 2.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.full((3,), float(rank))
    optimizer.step()
    buffers = {"mean": torch.tensor([float(rank)]), "count": torch.tensor(rank)}
    strategy = {"steps": torch.tensor([7]), f"{OWN_PREFIX}sent": torch.full((3,), float(rank))}
    strategy[f"{MEMBERSHIP_PREFIX}copy"] = torch.full((3,), 2.0 * rank)
    return LearnerState(
        rank,
        world,
        Position(position, outstanding),
        minutes,
        parameter.detach(),
        buffers,
        optimizer.state_dict(),
        strategy=strategy,
        of_strategy=DILOCO,
    )


def writer(experiment: Path, keep: int = 2, sync_group_size: int | None = None) -> CheckpointWriter:
    """A writer for learners that arrive one after the other in this process."""
    arrived: Counter[str] = Counter()

    def arrive(name: str) -> int:
        arrived[name] += 1
        return arrived[name]

    return CheckpointWriter(experiment / "checkpoints", arrive, write_model, {"model": "m"}, keep, sync_group_size)


def save_all(experiment: Path, world: int, position: Ticket, keep: int = 2, sync_group_size: int | None = None) -> Path:
    """A checkpoint by all learners."""
    together = writer(experiment, keep, sync_group_size)
    checkpoints = [together.save(state(rank, world, position)) for rank in range(world)]
    assert checkpoints[-1] is not None
    return checkpoints[-1].folder


def manifest_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says about itself, as JSON."""
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_a_checkpoint_appears_only_when_the_last_learner_has_written(tmp_path: Path) -> None:
    """Until everybody has written its part, there is nothing under the final name."""
    together = writer(tmp_path)
    assert together.save(state(1, 2, Ticket(1, 0, 8))) is None
    assert checkpoints_in(tmp_path / "checkpoints") == []
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        latest(tmp_path)
    saved = together.save(state(0, 2, Ticket(1, 0, 8)))
    assert saved is not None
    assert saved.folder == tmp_path / "checkpoints" / "step-00000008" == latest(tmp_path)
    assert saved == load(saved.folder)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000008"]


def test_every_learner_gets_back_what_it_saved(tmp_path: Path) -> None:
    """Weights, buffers, optimizer, strategy's state, position and minutes come back bit by bit."""
    checkpoint = load(save_all(tmp_path, 3, Ticket(2, 5, 17)))
    for rank in range(3):
        before, after = state(rank, 3, Ticket(2, 5, 17)), checkpoint.start(rank, 3, DILOCO)
        assert (after.rank, after.world, after.position, after.minutes) == (rank, 3, Position(Ticket(2, 5, 17)), 1.5)
        assert torch.equal(after.weights, before.weights)
        assert torch.equal(after.buffers["mean"], before.buffers["mean"])
        momentum = after.optimizer["state"][0]["momentum_buffer"]
        assert torch.equal(momentum, before.optimizer["state"][0]["momentum_buffer"])
        assert after.optimizer["param_groups"] == before.optimizer["param_groups"]
        assert after.strategy.keys() == before.strategy.keys()
        assert all(torch.equal(after.strategy[name], each) for name, each in before.strategy.items())


def test_the_model_is_the_mean_of_all_learners(tmp_path: Path) -> None:
    """Weights and floating-point buffers are averaged in rank order; other buffers are learner 0's."""
    folder = save_all(tmp_path, 3, Ticket(1, 0, 9))
    model = load_file(folder / "model" / "model.safetensors")
    weights = [state(rank, 3, Ticket(1, 0, 9)).weights for rank in range(3)]
    expected = weights[0].clone().add_(weights[1]).add_(weights[2]).div_(3)
    assert torch.equal(model["weights"], expected)
    assert torch.equal(model["mean"], torch.tensor([1.0]))
    assert torch.equal(model["count"], torch.tensor(0))


def test_what_a_strategy_keeps_is_for_the_same_one_and_as_many_learners_alone(tmp_path: Path) -> None:
    """All of it for the same strategy with the same options; nothing for another one, which begins with the consensus.

    What is kept for 2 learners, such as residuals and fragments under way, has no meaning for 3.
    """
    checkpoint, own = load(save_all(tmp_path, 2, Ticket(3, 0, 24))), f"{OWN_PREFIX}sent"
    assert set(checkpoint.start(1, 2, DILOCO).strategy) == {"steps", own, f"{MEMBERSHIP_PREFIX}copy"}
    assert checkpoint.what_changed(2, DILOCO) == ""
    for world, strategy in ((3, DILOCO), (2, OTHER), (2, STRATEGIES["allreduce"].described(AllReduceOptions()))):
        starts = [checkpoint.start(rank, world, strategy) for rank in range(world)]
        assert all(start.strategy == {} for start in starts)
        assert all(torch.equal(start.weights, checkpoint.consensus()) for start in starts)
        assert all(torch.equal(start.buffers["mean"], torch.tensor([rank % 2.0])) for rank, start in enumerate(starts))


@pytest.mark.parametrize(
    ("world", "strategy", "said"),
    [
        (2, OTHER, "diloco saved it with other options (every=100, now 50)"),
        (2, STRATEGIES["allreduce"].described(AllReduceOptions()), "diloco saved it, and this run trains with allred"),
        (5, DILOCO, "2 learners saved it, and this run has 5"),
    ],
)
def test_a_checkpoint_says_why_learners_cannot_continue_from_their_own_states(
    tmp_path: Path, world: int, strategy: str, said: str
) -> None:
    """For the line that a resumed run prints."""
    assert said in load(save_all(tmp_path, 2, Ticket(3, 0, 24))).what_changed(world, strategy)


def test_shards_are_for_the_strategy_that_kept_them(tmp_path: Path) -> None:
    """Their optimizers have another state under another one; with it, any learner may keep any of them."""
    together = writer(tmp_path)
    for rank in range(2):
        mine = state(rank, 2, Ticket(1, 0, 8))
        shard = ShardState(0, 3, torch.full((3,), 7.0), mine.optimizer)
        saved = together.save(replace(mine, shards=(shard,) if rank == 0 else (), weights=torch.full((3,), 7.0)))
    assert saved is not None
    for world in (2, 3):
        assert all([s.start for s in saved.start(rank, world, DILOCO).shards] == [0] for rank in range(world))
        assert all(saved.start(rank, world, OTHER).shards == () for rank in range(world))
        assert torch.equal(saved.start(1, world, OTHER).weights, torch.full((3,), 7.0))


def test_a_worker_gets_back_the_weights_under_its_shards(tmp_path: Path) -> None:
    """A server beside a worker: its model is the shards', and the worker computes with other weights."""
    mine = state(0, 1, Ticket(1, 0, 8))
    shard = ShardState(1, 3, torch.tensor([5.0, 6.0]), mine.optimizer)
    weights, under = torch.tensor([1.0, 5.0, 6.0]), torch.tensor([8.0, 9.0])
    saved = writer(tmp_path).save(replace(mine, weights=weights, shards=(shard,), under_shards=under))
    assert saved is not None
    assert torch.equal(saved.consensus()[1:], torch.tensor([5.0, 6.0]))
    start = saved.start(0, 1, DILOCO)
    assert torch.equal(start.weights, torch.tensor([1.0, 8.0, 9.0]))
    assert torch.equal(start.shards[0].weights, torch.tensor([5.0, 6.0]))
    assert torch.equal(saved.start(0, 1, OTHER).weights[1:], torch.tensor([5.0, 6.0]))


@pytest.mark.parametrize("distance", [0.0, 1e-6, 0.1])
def test_replicas_that_must_be_equal_and_are_not_are_an_error_in_place_of_a_checkpoint(
    tmp_path: Path, distance: float
) -> None:
    """Up to rounding; the message names the learners and how far they are apart."""
    arrived: Counter[str] = Counter()

    def arrive(name: str) -> int:
        arrived[name] += 1
        return arrived[name]

    together = CheckpointWriter(tmp_path / "checkpoints", arrive, write_model, {}, has_one_model=True)
    states = [state(rank, 3, Ticket(1, 0, 8), weights=[1.0, 2.0, 2.0]) for rank in range(3)]
    states = [replace(each, weights=torch.tensor([1.0, 2.0, 2.0])) for each in states]
    states[2] = replace(states[2], weights=torch.tensor([1.0 + distance, 2.0, 2.0]))
    saved = [together.save(each) for each in states[:2]]
    assert saved == [None, None]
    if distance < 0.01:
        assert together.save(states[2]) is not None
        return
    with pytest.raises(ProtocolError, match=r"learner 2's weights are 0\.1 away from learner 0's \(norm 3\)"):
        together.save(states[2])
    assert checkpoints_in(tmp_path / "checkpoints") == []
    with pytest.raises(ProtocolError, match="one model"):
        together.save_consensus([replace(each, position=Position(Ticket(2, 0, 16))) for each in states])


def test_another_number_of_learners_begins_with_the_consensus(tmp_path: Path) -> None:
    """All begin alike, with the optimizer state of former learner 0: with others they would not stay alike."""
    checkpoint = load(save_all(tmp_path, 2, Ticket(3, 0, 24)))
    starts = [checkpoint.start(rank, 5, DILOCO) for rank in range(5)]
    for rank, start in enumerate(starts):
        assert (start.rank, start.world) == (rank, 5)
        assert torch.equal(start.weights, checkpoint.consensus())
        momentum = start.optimizer["state"][0]["momentum_buffer"]
        assert torch.equal(momentum, torch.full((3,), 0.0))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_any_number_of_learners_may_resume_in_mid_epoch(tmp_path: Path, world: int) -> None:
    """All know what was handed out, and what of it was not done; the name of the checkpoint counts what was done."""
    outstanding = (Ticket(2, 7, 23), Ticket(3, 1, 25))
    together = writer(tmp_path)
    saved = [together.save(state(rank, 2, Ticket(3, 4, 28), outstanding=outstanding)) for rank in range(2)][-1]
    assert saved is not None
    assert saved.folder.name == "step-00000026+2"
    for rank in range(world):
        assert load(saved.folder).start(rank, world, DILOCO).position == Position(Ticket(3, 4, 28), outstanding)
    assert saved.manifest.position == Position(Ticket(3, 4, 28), outstanding)


def test_a_consensus_alone_can_be_used_but_not_resumed(tmp_path: Path) -> None:
    """A simulation keeps no learner's own state, and says so when asked for it."""
    saved = writer(tmp_path).save_consensus([state(rank, 2, Ticket(1, 0, 8)) for rank in range(2)])
    checkpoint = load(saved.folder)
    assert saved == checkpoint
    assert torch.equal(load_file(checkpoint.model_folder / "model.safetensors")["mean"], torch.tensor([0.5]))
    with pytest.raises(CheckpointError, match="one of a simulation has no learner states"):
        checkpoint.start(0, 2, DILOCO)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    """Retention removes the oldest ones, whole."""
    for epoch in range(1, 5):
        save_all(tmp_path, 1, Ticket(epoch, 0, 1000 * epoch), keep=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00003000", "step-00004000"]
    assert latest(tmp_path).name == "step-00004000"


def test_learners_may_be_epochs_apart(tmp_path: Path) -> None:
    """Several checkpoints are then under way; each is complete when its last learner arrives, and none is lost."""
    folder = tmp_path / "checkpoints"
    together = writer(tmp_path, keep=2)
    ends = [Ticket(epoch, 0, 10 * epoch) for epoch in (1, 2, 3)]
    assert [together.save(state(0, 3, end)) for end in ends] == [None] * 3
    assert [together.save(state(2, 3, end)) for end in ends[:2]] == [None] * 2
    assert checkpoints_in(folder) == []
    assert len(list(folder.iterdir())) == 3
    for end in ends[:2]:
        saved = together.save(state(1, 3, end))
        assert saved is not None
        assert load(latest(tmp_path)).manifest.next_ticket == end
    assert together.save(state(1, 3, ends[2])) is None
    saved = together.save(state(2, 3, ends[2]))
    assert saved is not None
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000030"]
    for rank in range(3):
        assert torch.equal(load(saved.folder).learner(rank).weights, state(rank, 3, ends[2]).weights)


@pytest.mark.parametrize("world", [3, 2], ids=["as many", "fewer"])
def test_learners_that_arrive_at_different_times_continue_together(tmp_path: Path, world: int) -> None:
    """A budget of minutes belongs to the run: all go on at the time of the last to arrive, whoever completed."""
    together = writer(tmp_path)
    for rank, minutes in enumerate((4.0, 9.0, 6.0)):
        saved = together.save(state(rank, 3, Ticket(1, 0, 8), minutes=minutes))
    assert saved is not None
    assert saved.manifest.minutes == 9.0
    assert [load(saved.folder).learner(rank).minutes for rank in range(3)] == [4.0, 9.0, 6.0]
    assert [load(saved.folder).start(rank, world, DILOCO).minutes for rank in range(world)] == [9.0] * world


def test_a_checkpoint_knows_how_far_its_learners_are_apart(tmp_path: Path) -> None:
    """The same from files as from states: the mean square of what parts learners from their mean."""
    states = [state(rank, 3, Ticket(1, 0, 8)) for rank in range(3)]
    columns = torch.stack([each.weights for each in states], dim=1).double()
    expected = float((columns - columns.mean(dim=1, keepdim=True)).square().sum() / 3)
    saved = load(save_all(tmp_path / "processes", 3, Ticket(1, 0, 8)))
    simulated = writer(tmp_path / "virtual").save_consensus(states)
    assert expected > 0.1
    assert saved.manifest.consensus_distance == pytest.approx(expected, rel=1e-6)
    assert simulated.manifest.consensus_distance == saved.manifest.consensus_distance


def test_a_distance_that_is_no_number_does_not_spoil_a_checkpoint(tmp_path: Path) -> None:
    """Weights that have exploded are saved all the same, without one."""
    together = writer(tmp_path)
    together.save(state(0, 2, Ticket(1, 0, 8)))
    saved = together.save(state(1, 2, Ticket(1, 0, 8), [float("inf"), 1.0, 2.0]))
    assert saved is not None
    assert load(saved.folder).manifest.consensus_distance is None


@pytest.mark.parametrize("number", range(1, 6))
def test_an_older_format_is_refused_by_name(tmp_path: Path, number: int) -> None:
    """Before 0.2 nothing was released; the message says what to do."""
    folder = save_all(tmp_path, 2, Ticket(1, 4, 12), sync_group_size=1)
    manifest = manifest_of(folder)
    assert manifest["format"] == 6
    del manifest["digest"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": number}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json has format {number}, .* train again, or resume with"):
        load(folder)


def test_a_manifest_without_its_digest_is_damaged(tmp_path: Path) -> None:
    """Whatever its format says."""
    folder = save_all(tmp_path, 1, Ticket(1, 0, 8))
    manifest = manifest_of(folder)
    del manifest["digest"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        load(folder)


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A resumed run with nothing to add does not rewrite the checkpoint that it came from."""
    folder = save_all(tmp_path, 1, Ticket(1, 0, 8))
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert writer(tmp_path).save(state(0, 1, Ticket(1, 0, 8))) is None
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    """Partial folders are never taken for checkpoints, and go at the next start."""
    for end in (Ticket(1, 0, 8), Ticket(2, 0, 16)):
        writer(tmp_path).save(state(0, 2, end))
    partial = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert partial == [".step-00000008.partial", ".step-00000016.partial"]
    remove_partial(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["learner-0.safetensors", "learner-1.json", "model/model.safetensors", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_names_the_file(tmp_path: Path, name: str, harm: str) -> None:
    """A flipped byte, a truncated or a missing file is a CheckpointError that names it."""
    folder = save_all(tmp_path, 2, Ticket(1, 0, 8))
    path = folder / name
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[0] ^= 0x80
        path.write_bytes(content)
    elif harm == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=str(path)):
        load(folder)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    """A manifest of a later version says that a newer Starling is needed."""
    folder = save_all(tmp_path, 1, Ticket(1, 0, 8))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match=r"manifest\.json has format 99.*newer Starling"):
        load(folder)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A failing disk ends in one message with the folder and what to do."""
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"step-00000008: a checkpoint cannot be written .*then resume"):
        writer(tmp_path).save(state(0, 1, Ticket(1, 0, 8)))


def test_learners_without_a_shared_file_system_are_told(tmp_path: Path) -> None:
    """When a learner's part is not where the last one looks, the message says what is needed."""
    together = writer(tmp_path)
    together.save(state(0, 2, Ticket(1, 0, 8)))
    remove_partial(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"learner-0\.safetensors missing from .*that all learners share"):
        together.save(state(1, 2, Ticket(1, 0, 8)))


def test_json_of_a_learner_holds_no_tensors(tmp_path: Path) -> None:
    """The scalars are plain JSON whose tensors are references into the safetensors file."""
    folder = save_all(tmp_path, 1, Ticket(1, 0, 8))
    scalars = json.loads((folder / "learner-0.json").read_text())
    tensors = load_file(folder / "learner-0.safetensors")
    strategy = {"strategy.steps", f"strategy.{OWN_PREFIX}sent", f"strategy.{MEMBERSHIP_PREFIX}copy"}
    assert set(tensors) == {"weights", "buffer.mean", "buffer.count", "optimizer.state.0.momentum_buffer", *strategy}
    assert decode_state(scalars["optimizer"], tensors)["param_groups"][0]["momentum"] == 0.9
