"""Reading pickles that anybody may have written: a stack machine that makes records of what it is told to call.

`pickle.load` calls whatever a file names. Here nothing that a file names is imported or called: a name must be in a
list that the caller gives, and a call of it becomes a `PickleRecord` of the name, the arguments and the state, which
the caller then checks and makes something of. The operations are those that Python's pickler and torch's write for
plain values, dataclasses and tensors (protocols 2 to 5); any other is an error, and so is a name that is not in the
list.

Time is linear in the length of the pickle, and memory in the containers that the caller allows. What it gives may be
shared, or contain itself; who walks it counts. Dicts and sets take only keys that cannot be made to collide
(`check_keys`), and the memo is a list.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection, Container, Iterable
from itertools import pairwise
from typing import Any

import torch

from quantshard.errors import CheckpointError
from quantshard.read_limits import NUMBER_KEYS, PICKLED_CONTAINERS

_INTEGER_BYTES = 32
"""Longest integer that is read; sizes and offsets have 8 at most, the state of NumPy's default generator 17."""

_KEY_LIMIT = 1 << 60
"""Integers from here on may have equal hashes, many of which make a dict slow."""

_MARKS = 1 << 10
"""Containers that may be unfinished at once; picklers nest them, and Python's stops at its recursion limit."""

_WEIGHTS: dict[type, int] = {dict: 3, set: 3}
"""How many containers one counts as; Python takes 232 bytes for a dict of one entry, and 72 for a list."""

_EQUAL_HASHES = 64
"""More than that are aimed at: of floats, powers of two have up to 34."""


class NeedsCodeError(CheckpointError):
    """It names what only running code could make. That is no damage: what was saved is no plain value."""


class PickleRecord:
    """What a pickle wants made: `name`, as "module.name", of what it would call; its `args`; the `state` it would set.

    A name that stands for itself, as a dtype does, has `args` None. `items`: what it would put into a dict's subclass.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args: Any = args
        self.items: dict[Any, Any] | None = None
        self.state: Any = None


def load_pickle(data: bytes | memoryview, allowed: Container[str], containers: int = PICKLED_CONTAINERS) -> Any:
    """What a pickle holds, with a `PickleRecord` in place of each object that is no plain value.

    Args:
        allowed: the names, as "module.name", that may stand in it.
        containers: how many lists, tuples and records it may hold; a set or dict counts as three. Each takes up to 100
            bytes of memory, for one byte of a file.

    Raises:
        NeedsCodeError: it names something else. Nothing of it was run.
        CheckpointError: it is damaged, cut short or no pickle.
    """
    try:
        return _PickleMachine(bytes(data), allowed, containers).run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"it is no whole pickle ({type(error).__name__})") from error


class _PickleMachine:
    """The stack, the marks on it and the memo of one pickle. A lookup that fails says that the pickle is damaged."""

    def __init__(self, data: bytes, allowed: Container[str], containers: int) -> None:
        self.data, self.allowed, self.at, self.containers = data, allowed, 0, containers
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.numbers: dict[int, tuple[Any, int]] = {}

    def run(self) -> Any:
        data, operations, stop = self.data, _BY_CODE, pickle.STOP[0]
        while (code := data[self.at]) != stop:
            self.at += 1
            operation = operations.get(code)
            if operation is None:
                raise CheckpointError(f"it has the pickle operation {bytes([code])!r}, which no checkpoint needs")
            operation(self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise IndexError(self.at)
        self.at += count
        return found

    def unsigned(self, count: int) -> int:
        if count == 1:
            found = self.data[self.at]
            self.at += 1
            return found
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end]
        self.at = end + 1
        return found.decode("utf-8")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.containers -= _WEIGHTS.get(type(value), 1)
        if self.containers < 0:
            raise CheckpointError("it holds more lists, dicts and objects than are read; save such as tensors")
        self.stack.append(value)

    def push_set(self) -> None:
        if "builtins.set" not in self.allowed:
            raise NeedsCodeError("it has a set, which no checkpoint needs")
        self.push_container(set())

    def mark(self) -> None:
        if len(self.marks) == _MARKS:
            raise CheckpointError("its objects are nested too deeply")
        self.marks.append(len(self.stack))

    def pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise IndexError(mark)
        found = self.stack[mark:]
        del self.stack[mark:]
        return found

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError(count)
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    # Operations ------------------------------------------------------------------------------------------------------

    def named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        full = f"{module}.{name}"
        if full not in self.allowed:
            shown = "".join(c if c.isprintable() else "?" for c in full[:120])
            raise NeedsCodeError(f"it names {shown}, which no checkpoint needs, so that nothing of it was read or run")
        self.push_container(PickleRecord(full))

    def call(self) -> None:
        function, args = self.pop(2)
        if type(function) is not PickleRecord or function.args is not None or type(args) is not tuple:
            raise TypeError
        self.push_container(PickleRecord(function.name, args))

    def build(self) -> None:
        (state,) = self.pop(1)
        made = self.stack[-1]
        if type(made) is not PickleRecord or made.args is None or made.state is not None:
            raise TypeError
        made.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def add(self) -> None:
        values = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError
        self.check_keys(target, values)
        target.update(values)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is PickleRecord:  # an OrderedDict, a dict's subclass
            target.items = {} if target.items is None else target.items
            target = target.items
        keys, values = items[::2], items[1::2]
        if type(target) is not dict:
            raise TypeError
        self.check_keys(target, keys)
        target.update(zip(keys, values, strict=True))

    def check_keys(self, target: Any, keys: list[Any]) -> None:
        """Check keys before they are put into a dict or set, which may get others by other operations."""
        if not all(map(_is_key, keys)):
            raise TypeError
        count = sum(type(key) is int for key in keys)
        if count and len(target) + count > NUMBER_KEYS:  # few targets are so large
            _, before = self.numbers.get(id(target), (None, 0))
            self.numbers[id(target)] = (target, before + count)  # held, so that its id stays its own
            _check_count(before + count)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def remember(self, place: int) -> None:
        if place < len(self.memo):
            self.memo[place] = self.stack[-1]
        elif place == len(self.memo):  # as picklers count
            self.memoize()
        else:
            raise IndexError(place)

    def frame(self) -> None:
        self.take(8)  # how long it is, which helps whoever reads from a stream

    def long(self) -> None:
        count = self.unsigned(1)
        if count > _INTEGER_BYTES:
            raise ValueError
        self.push(int.from_bytes(self.take(count), "little", signed=True))


def _constant(value: bool | None) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.stack.append(value)


def _container(make: Callable[[], Any]) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.push_container(make())


def _number(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.unsigned(count))


def _text(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.push(machine.take(machine.unsigned(count)).decode("utf-8", "surrogatepass"))


def _bytes(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.push(machine.take(machine.unsigned(count)))


def _remember(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.remember(machine.unsigned(count))


def _recall(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.memo[machine.unsigned(count)])


def _tuple(count: int) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.push_container(tuple(machine.pop(count)))


PERSISTENT = "persistent"
"""Name of the record of a storage that lies beside the pickle; its argument is what the pickle says of it."""

_OPERATIONS: dict[bytes, Callable[[_PickleMachine], None]] = {
    pickle.PROTO: lambda m: None if m.unsigned(1) <= 5 else m.named("pickle protocol", "6 or later"),
    pickle.FRAME: _PickleMachine.frame,
    pickle.MARK: _PickleMachine.mark,
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(True),
    pickle.NEWFALSE: _constant(False),
    pickle.EMPTY_DICT: _container(dict),
    pickle.EMPTY_LIST: _container(list),
    pickle.EMPTY_SET: _PickleMachine.push_set,
    pickle.EMPTY_TUPLE: _container(tuple),
    pickle.BININT: lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    pickle.BININT1: _number(1),
    pickle.BININT2: _number(2),
    pickle.LONG1: _PickleMachine.long,
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE: _text(1),
    pickle.BINUNICODE: _text(4),
    pickle.SHORT_BINBYTES: _bytes(1),
    pickle.BINBYTES: _bytes(4),
    pickle.TUPLE: lambda m: m.push_container(tuple(m.pop_mark())),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.APPEND: lambda m: m.append(m.pop(1)),
    pickle.APPENDS: lambda m: m.append(m.pop_mark()),
    pickle.ADDITEMS: _PickleMachine.add,
    pickle.SETITEM: lambda m: m.set_items(m.pop(2)),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    pickle.MEMOIZE: _PickleMachine.memoize,
    pickle.BINPUT: _remember(1),
    pickle.LONG_BINPUT: _remember(4),
    pickle.BINGET: _recall(1),
    pickle.LONG_BINGET: _recall(4),
    pickle.GLOBAL: lambda m: m.named(m.line(), m.line()),
    pickle.STACK_GLOBAL: lambda m: m.named(*m.pop(2)),
    pickle.REDUCE: _PickleMachine.call,
    pickle.NEWOBJ: _PickleMachine.call,
    pickle.BUILD: _PickleMachine.build,
    pickle.BINPERSID: lambda m: m.push_container(PickleRecord(PERSISTENT, tuple(m.pop(1)))),
}
_BY_CODE = {code[0]: operation for code, operation in _OPERATIONS.items()}


def _is_key(value: Any) -> bool:
    """What may be a key of a dict. No tuple: the hash of a deeply nested one overflows the interpreter's stack."""
    if type(value) is int:
        return -_KEY_LIMIT < value < _KEY_LIMIT
    return type(value) in _SECRET or type(value) is PickleRecord


_SECRET = (str, bytes, bool, type(None))
_HASHED = (*_SECRET, int, float, torch.Size, torch.dtype, torch.device)


def check_keys(values: Collection[Any]) -> None:
    """Check what is to be put into a dict or set: plain values, among them tuples that are nested a little at most.

    Raises:
        CheckpointError: they cannot be, or are such that it would take quadratic time.
    """
    if not _are_hashed(values):
        raise CheckpointError("it has a key that is no plain value")
    numbers = [hash(value) for value in values if type(value) not in _SECRET]
    _check_count(len(numbers))
    if has_many_equal(numbers):
        raise CheckpointError("it has keys made to have one hash, which would take hours to look up")


def _are_hashed(values: Iterable[Any]) -> bool:
    return all(type(value) in _HASHED or (type(value) is tuple and _are_hashed(value)) for value in values)


def has_many_equal(hashes: Iterable[int]) -> bool:
    """Whether some hash stands there more often than by chance."""
    ordered, run = sorted(hashes), 0
    for before, after in pairwise(ordered):
        run = run + 1 if before == after else 0
        if run >= _EQUAL_HASHES:
            return True
    return False


def _check_count(numbers: int) -> None:
    if numbers > NUMBER_KEYS:
        raise CheckpointError(
            f"it has a dict or set with more than {NUMBER_KEYS} numbers as keys, whose hashes can be made to collide; "
            "save such as a list or a tensor"
        )
