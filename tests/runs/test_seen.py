"""The record of who saw what is correct, and includes what could not be used."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from torch.distributed import HashStore

from starling.checkpoint.reader import latest, load
from starling.errors import DataError
from starling.events import Stream, read_stream
from starling.experiment.claim import set_up_and_claim
from starling.experiment.observers import Recorder, Skips
from starling.experiment.record import audit, begin_record, begin_segment, read_seen, segments, start_of
from starling.experiment.simulate import simulate_recipe
from starling.speech.recipe import check_recipe, fingerprints
from starling.speech.store import SpeechSet
from starling.speech.task import SPEECH
from starling.training.job import ClaimReport
from starling.workload import Position, Ticket
from tests.runs.conftest import Tree


def simulated(tree: Tree, **changes: object) -> tuple[Path, list[str]]:
    """The experiment of a simulation, and its messages."""
    recipe = check_recipe({**tree, "budget": {"epochs": 2}, "strategy": "adpsgd", **changes}, "r.yaml")
    said = io.StringIO()
    simulate_recipe(SPEECH, recipe, lambda line: None, Console(file=said, force_terminal=False, width=300))
    return recipe.exp / f"{recipe.name}-virtual", said.getvalue().splitlines()


def audited(experiment: Path) -> tuple[str, str]:
    """The table and the last line of an audit."""
    table, said = io.StringIO(), []
    audit(experiment, said.append, Console(file=table, width=200))
    return table.getvalue(), said[-1]


def test_an_audit_shows_who_saw_how_much(tree: Tree) -> None:
    """It lists every epoch and every learner; all utterances were seen once in each."""
    experiment, _ = simulated(tree)
    table, verdict = audited(experiment)
    assert verdict.endswith("2 of 2 complete epochs saw each of 24 utterances exactly once")
    assert "by 0" in table and "by 1" in table
    end = load(latest(experiment)).manifest.position
    sights = list(read_seen(experiment / "seen", end))
    assert {sight.learner for sight in sights} == {0, 1}
    assert sorted(sight.ticket.step for sight in sights) == list(range(end.next_ticket.step))


def test_an_audit_of_a_mixture_reports_the_passes_over_each_domain(tree: Tree) -> None:
    """With equal shares, the small domain is passed through more often, each of its utterances as often as any other or
    once more."""
    tree["mixture"] = {
        "domains": {"many": {"sets": "train"}, "few": {"sets": "test"}},
        "by": "utterances",
        "temperature": 0,
    }
    experiment, said = simulated(tree)
    assert any(line.startswith("passes over domains in an epoch: many 0.625, few 2.5") for line in said)
    verdict = audited(experiment)[1]
    assert "many 1.25 passes (each utterance 1 to 2 times), few 5.00 passes (each utterance 5 to 5 times)" in verdict


def written(line: str, change: Callable[[list[str]], list[str]]) -> str:
    """A mini-batch with other utterances, as a program would write it that knows no checksums."""
    event = {key: value for key, value in json.loads(line).items() if key != "crc"}
    return json.dumps(event | {"ids": change(event["ids"])}) + "\n"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[1:], "mini-batches .* were not computed"),
        (lambda lines: [*lines, lines[0]], "mini-batches .* were computed more than once"),
        (lambda lines: [*lines, '{"kind": "batch", "epoch": 1, "batch": "x", "step": 3}\n'], "is not a mini-batch"),
        (lambda lines: [*lines, "1\n"], r"learner-1\.jsonl:\d+: damaged"),
        (lambda lines: [lines[0].replace("song", "gong"), *lines[1:]], r"learner-1\.jsonl:\d+: damaged"),
        (lambda lines: [written(lines[0], lambda ids: ids[:-1]), *lines[1:]], "did not contain the utterances"),
        (lambda lines: [written(lines[0], lambda ids: ["gong"] * len(ids)), *lines[1:]], "did not contain the utter"),
    ],
    ids=["missing", "twice", "partial", "no event", "changed", "without an utterance", "with others"],
)
def test_an_audit_fails_when_something_is_wrong(tree: Tree, change: object, problem: str) -> None:
    """A mini-batch that was computed by no learner, or by two, is named; so is an invalid line."""
    experiment, _ = simulated(tree)
    record = segments(experiment / "seen")[0] / "learner-1.jsonl"
    lines = [line for line in record.read_text().splitlines(keepends=True) if '"batch"' in line]
    record.write_text("".join(change(lines)))  # type: ignore[operator]
    with pytest.raises(DataError, match=problem):
        audited(experiment)


def test_a_line_that_was_cut_where_its_learner_was_killed_is_not_read(tree: Tree) -> None:
    """It was written after the last checkpoint, or else it would be complete."""
    experiment, _ = simulated(tree)
    with (segments(experiment / "seen")[0] / "learner-0.jsonl").open("ab") as record:
        record.write('{"kind": "batch", "epoch": 1, "ids": ["sö'.encode()[:-1])
    assert "exactly once" in audited(experiment)[1]


def test_a_resume_drops_what_is_not_in_its_checkpoint(tmp_path: Path) -> None:
    """Records after the checkpoint, and those that it lists as not done, are dropped; earlier ones stay."""
    first = begin_segment(tmp_path, Position())
    (first / "learner-0.tsv").write_text("epoch\n" + "".join(f"1\t{step + 1}\t{step}\tu{step}\n" for step in range(9)))
    second = begin_segment(tmp_path, Position(Ticket(0, 5, 5), (Ticket(0, 3, 3),)))
    (second / "learner-0.tsv").write_text("epoch\n1\t4\t3\tu3\n1\t6\t5\tu5\n")
    end = Position(Ticket(0, 6, 6))
    assert sorted(sight.ticket.step for sight in read_seen(tmp_path, end)) == [0, 1, 2, 3, 4, 5]
    begin_record(tmp_path, Position(Ticket(0, 5, 5), (Ticket(0, 3, 3),)))
    assert segments(tmp_path) == [first, second]
    assert not (second / "learner-0.tsv").exists()


def test_a_membership_may_begin_where_another_did(tmp_path: Path) -> None:
    """Before that one completed a mini-batch: what it computed is in no weights."""
    first = begin_segment(tmp_path, Position())
    (first / "learner-0.tsv").write_text("epoch\n1\t1\t0\tu0\n1\t2\t1\tu1\n")
    for _ in range(11):
        segment = begin_segment(tmp_path, Position(Ticket(0, 2, 2)))
        (segment / "learner-0.tsv").write_text("epoch\n1\t3\t2\tu2\n")
    assert [path.suffix for path in segments(tmp_path)] == ["", "", *(f".{number}" for number in range(1, 11))]
    assert [sight.ticket.step for sight in read_seen(tmp_path, Position(Ticket(0, 3, 3)))] == [0, 1, 2]
    assert start_of(segment) == Position(Ticket(0, 2, 2))


def test_a_resume_keeps_the_membership_that_ended_where_it_began(tmp_path: Path) -> None:
    """A learner joined when all mini-batches were done, and the checkpoint has its state. What began there by a resume,
    and memberships after that, are dropped."""
    end = Position(Ticket(0, 2, 2))
    first, joined = begin_segment(tmp_path, Position()), begin_segment(tmp_path, end)
    Stream(joined / "learner-0.jsonl").append("membership", number=2)
    for _ in range(2):
        begin_record(tmp_path, end)
        found = segments(tmp_path)
        assert found[:2] == [first, joined]
        assert [path.name for path in found[2:]] == ["from-00000002.1"]
        Stream(found[2] / "learner-0.jsonl").append("membership", number=0)
        Stream(begin_segment(tmp_path, end) / "learner-0.jsonl").append("membership", number=1)


def damage(tree: Tree, count: int) -> list[str]:
    """Overwrite the audio of some utterances of the prepared training set, and return their names."""
    speech_set = SpeechSet.open(Path(tree["data"]["folder"]) / "train")
    shard = next((speech_set.folder / "shar").glob("*.tar"))
    content = bytearray(shard.read_bytes())
    for index in range(count):
        begin = int(speech_set._offsets[index])
        content[begin : begin + int(speech_set._sizes[index])] = bytes(int(speech_set._sizes[index]))
    shard.write_bytes(content)
    return [speech_set.id(index) for index in range(count)]


def test_a_bad_utterance_is_skipped_counted_and_listed(tree: Tree, tmp_path: Path) -> None:
    """This happens in each epoch, which continues with all other utterances."""
    tree["data"] |= {"folder": str(tmp_path / "data"), "filter": {"on_bad": "skip", "max_skipped": 0.1}}
    simulated(tree, budget={"steps": 1})
    bad = damage(tree, 2)
    experiment, said = simulated(tree)
    verdict = audited(experiment)[1]
    assert verdict.endswith(
        "0 of 2 complete epochs saw each of 24 utterances exactly once; 4 could not be used and were skipped"
    )
    streams = (read_stream(path) for path in (experiment / "seen").glob("*/learner-*.jsonl"))
    skips = [event for stream in streams for _, event in stream if event is not None and event["kind"] == "skip"]
    assert sorted((each["epoch"], each["id"]) for each in skips) == sorted((n, name) for n in (1, 2) for name in bad)
    assert all(each["reason"] for each in skips)
    assert sum(line.startswith("learner") and "skipped" in line for line in said) >= 2


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
def test_too_many_bad_utterances_fail_the_run(tree: Tree, tmp_path: Path, on_bad: str) -> None:
    """The first one does if the recipe does not skip, and otherwise those above the limit."""
    tree["data"] |= {"folder": str(tmp_path / "data"), "filter": {"on_bad": on_bad, "max_skipped": 0.1}}
    simulated(tree, budget={"steps": 1})
    bad = damage(tree, 3)
    problem = "3 utterances of epoch 1 could not be used" if on_bad == "skip" else "|".join(bad)
    with pytest.raises(DataError, match=problem):
        simulated(tree)


def test_the_treatment_of_bad_utterances_may_change_in_a_resume(tree: Tree) -> None:
    """A user may meet some while training continues with the same prepared set, and skip them."""
    recipe = check_recipe(tree, "r.yaml")
    set_up_and_claim(SPEECH, recipe, print)
    changed = check_recipe(
        {**tree, "data": {**tree["data"], "filter": {"on_bad": "skip", "max_skipped": 0.05}}}, "r.yaml"
    )
    assert fingerprints(changed) == fingerprints(recipe)
    said: list[str] = []
    set_up_and_claim(SPEECH, changed, said.append)
    assert ", kept" in said[0] and "written" not in said[0]


def test_utterances_skipped_before_a_resume_count(tmp_path: Path) -> None:
    """A resumed epoch has no more of them to spare than any other."""
    first = begin_segment(tmp_path, Position())
    (first / "skipped-0.tsv").write_text("epoch\tid\treason\n1\ta\tno\n1\tb\tno\n2\ta\tno\n")
    skips = Skips(HashStore().add, 2, print)
    seen = Recorder(begin_segment(tmp_path, Position(Ticket(0, 5, 5))), skips=skips)
    with pytest.raises(DataError, match="3 utterances of epoch 1 could not be used, the last one c"):
        seen.on_claim(ClaimReport(0, Ticket(0, 5, 5), skipped=(("c", "cut short"),)))
    seen.close()


@pytest.mark.parametrize("damaged", ["", "{", "{}", '{"next_ticket": {"epoch": 0, "index": 0, "step": 5}}'])
def test_a_segment_without_a_start_is_not_a_beginning(damaged: str, tmp_path: Path) -> None:
    segment = begin_segment(tmp_path, Position(Ticket(0, 4, 4)))
    assert start_of(segment) == Position(Ticket(0, 4, 4))
    (segment / "start.json").write_text(damaged)
    with pytest.raises(DataError, match=r"start\.json: "):
        start_of(segment)
