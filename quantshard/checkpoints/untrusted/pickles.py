"""Reads untrusted pickles: a stack machine that records calls instead of executing them.

`pickle.load` calls whatever a file names. Here nothing is imported or called: every name must be in a list from the
caller, and a call becomes a `PickleRecord` of name, arguments and state, which the caller validates. Supported are the
operations that Python's pickler and torch emit for plain values, dataclasses and tensors (protocols 2 to 5); other
operations and names raise.

Time is linear in the length of the pickle, and memory in the number of containers that the caller allows. The result
can contain shared or cyclic references, so callers must bound their traversal. Keys of dicts and sets cannot be made to
collide (`check_keys`), and the memo is a list.
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
"""Longest integer to read: sizes and offsets have at most 8 bytes, the state of NumPy's default generator 17."""

_KEY_LIMIT = 1 << 60
"""Integers from this limit on can share hashes, which makes a dict slow."""

_MARKS = 1 << 10
"""Largest number of unfinished containers at once. Picklers nest containers up to Python's recursion limit."""

_WEIGHTS: dict[type, int] = {dict: 3, set: 3}
"""Containers that one object counts as: Python needs 232 bytes for a dict of one entry, and 72 for a list."""

_EQUAL_HASHES = 64
"""More equal hashes than this are deliberate; among floats, up to 34 powers of two share one."""


class NeedsCodeError(CheckpointError):
    """A value that only running code could build. It is not a plain value, but also not damaged."""


class PickleRecord:
    """An object that a pickle would build.

    `name`: "module.name" of the callable. `args`: its arguments; None for a bare name, such as a dtype. `state`: the
    state to set. `items`: entries of a subclass of dict.
    """

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args: Any = args
        self.items: dict[Any, Any] | None = None
        self.state: Any = None


def load_pickle(data: bytes | memoryview, allowed: Container[str], containers: int = PICKLED_CONTAINERS) -> Any:
    """Decode a pickle, with a `PickleRecord` in place of each object that is not a plain value.

    Args:
        allowed: the names ("module.name") that are allowed in the pickle.
        containers: the largest number of lists, tuples and records; a set or dict counts as three. Each takes up to 100
            bytes of memory, for one byte of the file.

    Raises:
        NeedsCodeError: the pickle names anything else. Nothing was executed.
        CheckpointError: the pickle is damaged, truncated, or not a pickle.
    """
    try:
        return _PickleMachine(bytes(data), allowed, containers).run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"it is no whole pickle ({type(error).__name__})") from error


class _PickleMachine:
    """Stack, marks and memo of one pickle. A failed lookup means that the pickle is damaged."""

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
        content = self.data[self.at : self.at + count]
        if len(content) != count:
            raise IndexError(self.at)
        self.at += count
        return content

    def unsigned(self, count: int) -> int:
        if count == 1:
            number = self.data[self.at]
            self.at += 1
            return number
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        content = self.data[self.at : end]
        self.at = end + 1
        return content.decode("utf-8")

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
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError(count)
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    # Operations ------------------------------------------------------------------------------------------------------

    def named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        full_name = f"{module}.{name}"
        if full_name not in self.allowed:
            printable = "".join(c if c.isprintable() else "?" for c in full_name[:120])
            raise NeedsCodeError(
                f"it names {printable}, which no checkpoint needs, so that nothing of it was read or run"
            )
        self.push_container(PickleRecord(full_name))

    def call(self) -> None:
        function, args = self.pop(2)
        if type(function) is not PickleRecord or function.args is not None or type(args) is not tuple:
            raise TypeError
        self.push_container(PickleRecord(function.name, args))

    def build(self) -> None:
        (state,) = self.pop(1)
        record = self.stack[-1]
        if type(record) is not PickleRecord or record.args is None or record.state is not None:
            raise TypeError
        record.state = state

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
        # A subclass of dict, such as OrderedDict.
        if type(target) is PickleRecord:
            target.items = {} if target.items is None else target.items
            target = target.items
        keys, values = items[::2], items[1::2]
        if type(target) is not dict:
            raise TypeError
        self.check_keys(target, keys)
        target.update(zip(keys, values, strict=True))

    def check_keys(self, target: Any, keys: list[Any]) -> None:
        """Check keys before they are added to a dict or set, which other operations can extend further."""
        if not all(map(_is_key, keys)):
            raise TypeError
        count = sum(type(key) is int for key in keys)
        # Count numbers only in large targets, which are few.
        if count and len(target) + count > NUMBER_KEYS:
            _, previous = self.numbers.get(id(target), (None, 0))
            # The reference to the target keeps its id from being reused.
            self.numbers[id(target)] = (target, previous + count)
            _check_count(previous + count)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def remember(self, place: int) -> None:
        if place < len(self.memo):
            self.memo[place] = self.stack[-1]
        # Picklers number the memo in order.
        elif place == len(self.memo):
            self.memoize()
        else:
            raise IndexError(place)

    def frame(self) -> None:
        # The frame's length matters only to readers of streams.
        self.take(8)

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
"""Name of the record of a storage outside the pickle; its argument is the pickle's description of the storage."""

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
    """Whether a value can be a dict key. Tuples cannot: the hash of a deeply nested one overflows the stack."""
    if type(value) is int:
        return -_KEY_LIMIT < value < _KEY_LIMIT
    return type(value) in _SECRET or type(value) is PickleRecord


_SECRET = (str, bytes, bool, type(None))
_HASHED = (*_SECRET, int, float, torch.Size, torch.dtype, torch.device)


def check_keys(values: Collection[Any]) -> None:
    """Check keys of a dict or set: plain values, possibly tuples with little nesting.

    Raises:
        CheckpointError: a key is not hashable, or the keys would take quadratic time.
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
    """Whether some hash occurs more often than by chance."""
    ordered, run = sorted(hashes), 0
    for previous, current in pairwise(ordered):
        run = run + 1 if previous == current else 0
        if run >= _EQUAL_HASHES:
            return True
    return False


def _check_count(numbers: int) -> None:
    if numbers > NUMBER_KEYS:
        raise CheckpointError(
            f"it has a dict or set with more than {NUMBER_KEYS} numbers as keys, whose hashes can be made to collide; "
            "save such as a list or a tensor"
        )
