"""Checkpoints that were damaged, or made to do harm: a CheckpointError, soon, or what was saved."""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from starling.checkpoint.files import Manifest, listing, read_manifest
from starling.checkpoint.reader import load
from starling.errors import CheckpointError
from starling.workload import Ticket
from tests.checkpoint.test_checkpoints import DILOCO, manifest_of, save_all
from tests.computing import computing_below
from tests.mutations import damaged

WORLD = 2
FILES = ("learner-0.safetensors", "learner-0.json", "learner-1.json", "model/model.safetensors", "manifest.json")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint of two learners."""
    return save_all(tmp_path / "whole", WORLD, Ticket(2, 5, 17))


def signed(folder: Path, **changes: Any) -> None:
    """Make the manifest agree with what the files hold now, as somebody who means harm can."""
    content = manifest_of(folder) | {"files": {k: v.model_dump() for k, v in listing(folder).items()}}
    manifest = Manifest.model_validate(content | changes).with_digest()
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def content_of(folder: Path) -> list[Any]:
    """Everything that a run would go on from."""
    checkpoint = load(folder)
    states = [checkpoint.start(rank, world, DILOCO) for world in (WORLD, 1) for rank in range(world)]
    manifest = checkpoint.manifest.model_dump(exclude={"files", "digest"})
    return [manifest, *(_plain(vars(state)) for state in states)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.wide
@pytest.mark.parametrize("resigned", [False, True], ids=["damaged", "forged"])
def test_mutations_are_the_same_checkpoint_or_checkpoint_errors(whole: Path, tmp_path: Path, resigned: bool) -> None:
    """500 of every file, also deleted and swapped: nothing but CheckpointError, or what was saved, to the bit.

    Where the digests are forged to fit, the content may be another one, and what is raised still is CheckpointError.
    """
    expected = content_of(whole)
    random = np.random.default_rng(17)
    folder = tmp_path / "mutated"
    ends: Counter[str] = Counter()
    for number in range(250 if resigned else 500):
        damage = damaged(whole, folder, FILES[number % len(FILES)], FILES, random)
        with computing_below(1.0):
            try:
                if resigned and damage.victim.name != "manifest.json":
                    signed(folder)
                found = content_of(folder)
                assert resigned or found == expected, damage
                ends["read"] += 1
            except CheckpointError as error:
                assert str(tmp_path) in str(error)
                ends["refused"] += 1
            except (ValueError, FileNotFoundError):  # the forger's own, who needs a manifest to begin with
                assert resigned and "manifest.json" in (damage.victim.name, damage.other.name) and damage.is_moved
    assert ends["refused"] > 100 and ends["read"] > (25 if resigned else 0)


@pytest.mark.parametrize("place", range(0, 40))
def test_a_flipped_byte_anywhere_in_the_manifest_is_noticed(whole: Path, place: int) -> None:
    """Numbers included, which would still be numbers."""
    path = whole / "manifest.json"
    content = bytearray(path.read_bytes())
    digits = [number for number, byte in enumerate(content) if chr(byte).isdigit()]
    position = digits[place * len(digits) // 40]
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load(whole)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "model/../learner-0.json", "a\0b", "x" * 5000, ""])
def test_a_manifest_cannot_point_outside_its_folder(whole: Path, name: str) -> None:
    """`..`, absolute names, and names that no file can have are refused before anything is read."""
    entries = {k: v.model_dump() for k, v in listing(whole).items()}
    signed(whole, files=entries | {name: {"num_bytes": 0, "sha256": ""}})
    with pytest.raises(CheckpointError, match=r"lies outside|not a plain file"):
        load(whole)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [_fifo, _link, _folder])
def test_what_is_no_plain_file_is_refused_by_name(whole: Path, name: str, harm: Callable[[Path], None]) -> None:
    """A pipe would be waited for without end, and a link may lead anywhere."""
    harm(whole / name)
    with pytest.raises(CheckpointError, match=f"{name}(.,)? (is not a plain file|which lies outside)"):
        load(whole)


def test_a_linked_folder_inside_a_checkpoint_is_refused(whole: Path, tmp_path: Path) -> None:
    """Though the files behind it are the right ones."""
    (whole / "model").rename(tmp_path / "model")
    (whole / "model").symlink_to(tmp_path / "model")
    with pytest.raises(CheckpointError, match="lies outside"):
        load(whole)


def test_a_file_that_the_manifest_does_not_list_is_not_read(whole: Path) -> None:
    """Nobody knows whether it is as it was written."""
    entries = {k: v.model_dump() for k, v in listing(whole).items() if k != "learner-0.json"}
    signed(whole, files=entries)
    with pytest.raises(CheckpointError, match=r"does not list learner-0\.json"):
        load(whole).learner(0)


def _header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _tensor(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"weights": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        _header(b"{}", 2**63 - 1),
        _header(b"{}", 2**64 - 1),
        _header(b"{}", 99_999_999),
        _header(b" " * 1000 + b"{}", 2**40),
        _header(b"{" * 50_000),
        _header(b'{"a":' * 50_000),
        _header(_tensor("F32", [3], [0, 12])),
        _header(_tensor("F32", [2**62], [0, 12]), data=b"\0" * 12),
        _header(_tensor("F32", [2**31, 2**31], [0, 12]), data=b"\0" * 12),
        _header(_tensor("F32", [3], [12, 0]), data=b"\0" * 12),
        _header(_tensor("F99", [3], [0, 12]), data=b"\0" * 12),
        _header(_tensor("F32", [-3], [0, 12]), data=b"\0" * 12),
        _header(_tensor("F32", [3, 1], [0, 12]), data=b"\0" * 12),
        _header(_tensor("I32", [3], [0, 12]), data=b"\0" * 12),
        _header(b"{}"),
    ],
)
def test_headers_of_safetensors_are_not_believed(whole: Path, content: bytes) -> None:
    """Whatever lengths and shapes they claim, and whoever signed them."""
    (whole / "learner-0.safetensors").write_bytes(content)
    signed(whole)
    with pytest.raises(CheckpointError, match=r"learner-0\.(safetensors|json)"):
        load(whole).start(0, 1, DILOCO)


@pytest.mark.wide
@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"rank":' * 100_000,
        '{"a": [' * 400 + "]}" * 400,
        "[]",
        "null",
        "{}",
        "3",
        '{"rank": NaN}',
        "9" * 5000,
        '{"optimizer": {"$tensor": "absent"}}',
        '{"optimizer": {"$pairs": [3]}}',
        '{"optimizer": {"$pairs": [[[], 1]]}}',
        '{"optimizer": {"$float": "x"}}',
        '{"optimizer": {"$tensor": []}}',
        '{"shards": 3}',
        '{"shards": [3]}',
        '{"shards": [{"start": "x"}]}',
        '{"next_ticket": {"epoch": -1}}',
        '{"outstanding": [3]}',
        '{"minutes": "soon"}',
    ],
)
@pytest.mark.parametrize("merged", [True, False])
def test_json_of_a_learner_is_not_believed(whole: Path, content: str, merged: bool) -> None:
    """Depth without end, other types, references to nothing: alone, or in place of a part of what was saved."""
    path = whole / "learner-0.json"
    try:
        changes = json.loads(content)
    except (ValueError, RecursionError):
        changes = None
    if merged and isinstance(changes, dict) and changes and len(content) < 200:
        content = json.dumps(json.loads(path.read_text()) | changes)
    path.write_text(content)
    signed(whole)
    if merged and '"rank": NaN' in content:
        return  # a rank that is in the file's name already
    with pytest.raises(CheckpointError, match=r"learner-0\.json"):
        load(whole).start(0, 1, DILOCO)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"files":' * 100_000, "[]", "3", "{}", '{"format": 6}'])
def test_a_manifest_that_is_none_is_refused(whole: Path, content: str) -> None:
    """Deep nesting included, which Python gives up on."""
    (whole / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(whole)


def test_learners_of_different_sizes_have_no_consensus(whole: Path, tmp_path: Path) -> None:
    """Files of two checkpoints, signed together."""
    path = whole / "learner-1.safetensors"
    path.write_bytes(_header(_tensor("F32", [1], [0, 4]), data=b"\0" * 4))
    scalars = json.loads((whole / "learner-1.json").read_text()) | {"optimizer": {}, "strategy": {}}
    (whole / "learner-1.json").write_text(json.dumps(scalars))
    signed(whole)
    with pytest.raises(CheckpointError, match="weights have different shapes"):
        load(whole).start(0, 1, DILOCO)
