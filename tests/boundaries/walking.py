"""What a strategy keeps between its steps, found by a walk over its live coroutines and the objects that they hold.

A local variable counts if it is read before it is written again. Work under way, that is everything that can be
awaited, does not count, nor do the engine's own objects: the learner and the model shards.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

import starling.learner
from starling.configuration import Config
from starling.learner import Handle, Learner, Shard
from starling.topology import Topology

_STARLING = Path(starling.learner.__file__).parent
_OF_ENGINES = (str(_STARLING / "engines"), str(_STARLING / "training"))
_ENGINES = (Learner, Shard, Config, Topology, type, ModuleType, torch.dtype, torch.device, slice, range)
"""What engines own, and what never changes."""
_NO_RETURN = ("RETURN", "RAISE", "RERAISE")


def found_in(coroutines: Sequence[Coroutine[Any, Any, None]]) -> dict[str, Any]:
    """The numbers and tensors that coroutines of one learner keep, by their path; one of them may be running."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for coroutine in coroutines:
        for frame in _frames(coroutine):
            name = frame.f_code.co_qualname
            declared = frame.f_globals.get("DROPPED", ())
            for variable, value in _live(frame).items():
                if variable not in declared:
                    _walk(value, f"{name}: {variable}", found, seen)
    return found


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of the strategy's code in a coroutine, from the outermost to the innermost."""
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_RUNNING:
        stack: list[FrameType] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not coroutine.cr_frame:
            stack.append(frame)
            frame = frame.f_back
        yield coroutine.cr_frame
        yield from takewhile(lambda each: not each.f_code.co_filename.startswith(_OF_ENGINES), reversed(stack))
        return
    while inspect.iscoroutine(coroutine):
        if coroutine.cr_frame is not None:
            yield coroutine.cr_frame
        coroutine = coroutine.cr_await


def _live(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame that are read before they are written again."""
    names = _read_after(frame.f_code, frame.f_lasti)
    return {name: value for name, value in frame.f_locals.items() if name in names}


def _read_after(code: CodeType, at: int) -> set[str]:
    """The names of local variables that may be read after the instruction at an offset, before they are written."""
    instructions = list(dis.get_instructions(code))
    place = {instruction.offset: number for number, instruction in enumerate(instructions)}
    present = max(number for number, instruction in enumerate(instructions) if instruction.offset <= at)
    found = set(code.co_cellvars) | set(code.co_freevars)
    for name in code.co_varnames:
        waiting, visited = _following(instructions, place, present), set[int]()
        while waiting:
            number = waiting.pop()
            if number in visited:
                continue
            visited.add(number)
            reads, writes = _uses(instructions[number], name)
            if reads:
                found.add(name)
                break
            if not writes:
                waiting += _following(instructions, place, number)
    return found


def _following(instructions: Sequence[dis.Instruction], place: Mapping[int, int], number: int) -> list[int]:
    """The instructions that may follow one, without exceptions."""
    instruction = instructions[number]
    following = []
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        following.append(place[instruction.argval])
    is_last = instruction.opname.startswith(_NO_RETURN) or instruction.opname in (
        "JUMP_FORWARD",
        "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT",
    )
    if not is_last and number + 1 < len(instructions):
        following.append(number + 1)
    return following


def _uses(instruction: dis.Instruction, name: str) -> tuple[bool, bool]:
    """Whether an instruction reads a local variable, and whether it writes it, before it reads it."""
    operation, names = instruction.opname, instruction.argval
    if "_FAST" not in operation:
        return False, False
    parts = [part for part in operation.split("_") if part in ("LOAD", "STORE", "DELETE")]
    for part, each in zip(parts, names if isinstance(names, tuple) else (names,), strict=False):
        if each == name:
            return part == "LOAD", part != "LOAD"
    return False, False


def _walk(value: Any, path: str, found: dict[str, Any], seen: set[int]) -> None:
    """Add what `value` holds."""
    if isinstance(value, Tensor | bool | int | float | str | bytes | None):
        found[path] = value
    elif isinstance(value, _ENGINES) or is_under_way(value) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        if isinstance(value, Mapping | Sequence | deque):
            found[f"{path} has"] = len(value)
        for name, part in _parts(value):
            _walk(part, path + name, found, seen)


def is_under_way(value: Any) -> bool:
    """Whether something can be awaited, or is a tuple or list of which a part can: it is work under way."""
    if isinstance(value, Handle) or hasattr(value, "__await__"):
        return True
    return isinstance(value, tuple | list | deque) and any(is_under_way(each) for each in value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object consists of, except what its class declares."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, Set):
        yield "{}", repr(sorted(value, key=repr))
    elif isinstance(value, Sequence | deque):
        yield from ((f"[{place}]", each) for place, each in enumerate(value))
    elif inspect.isgenerator(value):
        if value.gi_frame is not None:
            yield from ((f" {name}", each) for name, each in _live(value.gi_frame).items())
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, partial):
        yield from ((f"({place})", each) for place, each in enumerate([*value.args, *value.keywords.values()]))
    elif isinstance(value, FunctionType):
        names = value.__code__.co_freevars
        yield from (
            (f"({name})", cell.cell_contents) for name, cell in zip(names, value.__closure__ or (), strict=True)
        )
    else:
        yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    declared = getattr(type(value), "DROPPED", ())
    names = [*getattr(value, "__dict__", {})]
    names += [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    for name in names:
        if name not in declared and hasattr(value, name):
            yield f".{name}", getattr(value, name)
