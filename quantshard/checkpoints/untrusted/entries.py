"""One entry of a `.distcp` file: a tensor or a plain object as `torch.save` writes it, read without trusting it.

What the caller wants saved is read here before it is written, so that nothing is saved that would not be read again.

An entry is an archive (zip) of uncompressed records: a pickle and the bytes of each storage. The pickle goes through
`pickles`, the tensors are made here: each is shown to lie within its storage, whose bytes are those of the record, so
that nothing is allocated that the file does not hold. Checksums of the records, which `torch.load` does not look at,
are compared too.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quantshard.checkpoints.disk.store import why
from quantshard.checkpoints.untrusted import pickles
from quantshard.checkpoints.untrusted.pickles import PERSISTENT, PickleRecord
from quantshard.errors import CheckpointError, ConfigurationError
from quantshard.read_limits import OBJECT_BYTES, OBJECT_VALUES, RECORDS_BYTES

DTYPES: Mapping[str, torch.dtype] = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype by its full name; `torch.half` and other second names are `torch.float16`."""

NO_TENSORS = frozenset(dtype for name, dtype in DTYPES.items() if re.fullmatch(r"torch\.(q\w+|u?int[1-7])", name))
"""Dtypes of which PyTorch cannot copy a tensor by itself: those of integers in a scale, and of fewer bits than 8."""

_TYPED_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
}  # fmt: skip
_UNTYPED = "torch.storage.UntypedStorage"
_TENSOR, _TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"

_LOCAL_HEADER = 30  # bytes before the name of a record
_DEPTH, _DIMS = 32, 64
_MOST = 1 << 62
EMPTY_EXTENT = 1 << 24
"""What the dims of a tensor without elements may multiply to, but for those that are 0."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """What a file would have called: the `name`, the arguments, and the state it would set. Nothing was called."""

    name: str
    args: tuple[Any, ...]
    state: Any


def read_entry(file: BinaryIO, offset: int, length: int, calls: Collection[str] = ()) -> Any:
    """The tensor or object in `length` bytes of a file.

    None, numbers, strings, bytes, lists, tuples, sets, dicts, `torch.Size`, dtypes, devices, and tensors on the CPU.
    `calls`: names, as "module.name", of classes and functions of other libraries; a `RecordedCall` stands for what they
    made.

    Raises:
        NeedsCodeError: it holds anything else.
        CheckpointError: it is damaged, or says more than its bytes hold.
        OSError: the file cannot be read.
    """
    archive = _Archive(file, offset, length)
    content = archive.record("data.pkl", OBJECT_BYTES)
    return _ValueDecoder(archive, calls).value(pickles.load_pickle(content, {*_NAMES, *calls}))


def checked_entry(what: str, value: Any) -> tuple[bytes, Any]:
    """The bytes of an entry that is to be written, and what `read_entry` makes of them.

    Raises:
        ConfigurationError: it would not be read again; `what` it is is said, down to the part that cannot be.
    """
    try:
        return _written_and_read(value)
    except Exception as error:  # an object of the caller's can fail to be saved in any way
        what, part, cause = _culprit(what, value, error)
        raise ConfigurationError(
            f"{what}, a {type(part).__name__}, cannot be saved as plain data ({why(cause)}); save what says the same "
            "in numbers, strings, tensors, lists, tuples, and dicts with strings or integers as keys (a DTensor as an "
            "entry of `extra` itself)"
        ) from error


def _written_and_read(value: Any) -> tuple[bytes, Any]:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue(), read_entry(file, 0, file.tell())


def _culprit(what: str, value: Any, error: Exception, depth: int = 0) -> tuple[str, Any, Exception]:
    """The innermost part that cannot be read by itself: what it is, the part, and the error that it gives."""
    parts = dict(enumerate(value)) if type(value) in (list, tuple) else value
    if isinstance(parts, dict) and depth < _DEPTH:
        for key, part in parts.items():
            try:
                _written_and_read(part)
            except Exception as found:  # as above
                return _culprit(f"{what}[{key!r}]", part, found, depth + 1)
    return what, value, error


class _FileSlice(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise ValueError("it points before its beginning")
        self.at = start + offset
        return self.at

    def read(self, size: int = -1, /) -> bytes:
        """Read the list of records, of which `zipfile` makes an object each, or a header."""
        if size > RECORDS_BYTES:
            raise ValueError(f"its list of records has more than {RECORDS_BYTES} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.length - self.at))]
        self.file.seek(self.offset + self.at)
        count = self.file.readinto(view) if len(view) else 0  # type: ignore[attr-defined]
        self.at += count
        return int(count)


class _Archive:
    """The records of one entry, each found, checked to be what it says, and read when it is asked for."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.slice, self.length = _FileSlice(file, offset, length), length
        try:
            listed = zipfile.ZipFile(self.slice).infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OverflowError) as error:
            raise CheckpointError(f"it is no whole archive of torch.save ({error})") from error
        self.records = {record.filename.partition("/")[2]: record for record in listed}
        if len(self.records) != len(listed):
            raise CheckpointError("its archive has two records of one name")
        if sum(record.file_size for record in listed) > length:
            raise CheckpointError(f"its records claim more than its {length} bytes")
        if "byteorder" in self.records and self.record("byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")

    def record(self, name: str, limit: int = 1 << 16) -> bytes:
        """The bytes of a record, at most `limit`."""
        if name in self.records and self.records[name].file_size > limit:
            raise CheckpointError(
                f"its {name} has more than the {limit} bytes that are read of it; save what is large as tensors"
            )
        return self.storage(name).numpy().tobytes()

    def storage(self, name: str) -> Tensor:
        """The bytes of a record, as uint8 [n] in memory of its own."""
        info = self.records.get(name)
        if info is None:
            raise CheckpointError(f"its archive has no record {name[:80]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise CheckpointError(f"its record {name[:80]!r} is compressed or encrypted, which torch.save never does")
        self.slice.seek(max(info.header_offset, 0))
        header = self.slice.read(_LOCAL_HEADER)
        if info.header_offset < 0 or len(header) != _LOCAL_HEADER or header[:4] != b"PK\3\4":
            raise CheckpointError(f"its record {name[:80]!r} has no header where its archive says")
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[26:]))
        if start + info.file_size > self.length:
            raise CheckpointError(f"its record {name[:80]!r} ends behind the entry")
        found = torch.empty(info.file_size, dtype=torch.uint8, device="cpu")
        view, at = found.numpy().data, 0
        self.slice.seek(start)
        while at < len(view) and (count := self.slice.readinto(view[at:])):
            at += count
        if at < len(view) or (info.CRC and zlib.crc32(view) != info.CRC):  # 0: torch.save was told to write none
            raise CheckpointError(f"its record {name[:80]!r} is damaged: it is cut short or has another checksum")
        return found


class _ValueDecoder:
    """Plain values and tensors from the records of a pickle."""

    def __init__(self, archive: _Archive, calls: Collection[str]) -> None:
        self.archive, self.budget, self.depth = archive, OBJECT_VALUES, 0
        self.encoded: dict[int, bytes] = {}
        self.calls = calls
        self.storages: dict[str, Tensor] = {}

    def value(self, raw: Any) -> Any:
        self.budget -= 1
        if self.budget < 0 or self.depth > _DEPTH:
            raise CheckpointError("its objects are nested too deeply, hold each other, or are too many")
        if raw is None or isinstance(raw, bool | int | float | str | bytes):
            return raw
        self.depth += 1
        found = self._container(raw)
        self.depth -= 1
        return found

    def keys(self, raw: Iterable[Any]) -> list[Any]:
        """What a dict or set can be made of."""
        found = list(map(self.value, raw))
        pickles.check_keys(found)
        return found

    def _container(self, raw: Any) -> Any:
        if isinstance(raw, list | tuple):
            return type(raw)(map(self.value, raw))
        if isinstance(raw, set):
            return set(self.keys(raw))
        if isinstance(raw, dict):
            return dict(zip(self.keys(raw), map(self.value, raw.values()), strict=True))
        if raw.args is None:
            if raw.name not in DTYPES:
                raise CheckpointError(f"it holds {raw.name}, which is no value")
            return DTYPES[raw.name]
        if raw.name in self.calls:
            return RecordedCall(raw.name, tuple(map(self.value, raw.args)), self.value(raw.state))
        maker = _MAKERS.get(raw.name)
        if maker is None:
            raise CheckpointError(f"it calls {raw.name}")
        try:
            return maker(self, raw)
        except (TypeError, ValueError, IndexError, RuntimeError, LookupError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"its {raw.name.rpartition('.')[2]} is damaged ({type(error).__name__})") from error

    def ordered(self, raw: PickleRecord) -> OrderedDict[Any, Any]:
        if raw.args:
            raise ValueError
        return OrderedDict(self.value(raw.items or {}))  # without attributes, such as a module puts on its state dict

    def tensor(self, raw: PickleRecord) -> Tensor:
        pid, offset, size, stride = raw.args[:4]
        typed = raw.name == _TENSOR
        rest = raw.args[6:] if typed else raw.args[7:]
        if any(rest) or not (_is_count(offset) and is_shape(size) and _are_counts(stride)):
            raise ValueError
        dtype, storage = self._storage(pid, None if typed else DTYPES[_name(raw.args[6])])
        if len(size) != len(stride) or dtype in NO_TENSORS:
            raise ValueError
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else -1
        if math.prod(size) * dtype.itemsize > storage.numel() or (last + 1) * dtype.itemsize > storage.numel():
            raise CheckpointError(f"its tensor of shape {list(size)} does not lie within its {storage.numel()} bytes")
        whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(size, stride, offset if math.prod(size) else 0)

    def _storage(self, pid: PickleRecord, dtype: torch.dtype | None) -> tuple[torch.dtype, Tensor]:
        if type(pid) is not PickleRecord or pid.name != PERSISTENT:
            raise ValueError
        kind, storage, key, _, _ = pid.args[0]
        if kind != "storage" or type(key) is not str:
            raise ValueError
        if dtype is None:
            dtype = _TYPED_STORAGES[_name(storage)]
        elif _name(storage) != _UNTYPED:
            raise ValueError
        if key not in self.storages:
            self.storages[key] = self.archive.storage(f"data/{key}")
        return dtype, self.storages[key]

    def parameter(self, raw: PickleRecord) -> Tensor:
        found = self.value(raw.args[0])
        if not isinstance(found, Tensor):
            raise ValueError
        return found

    def set(self, raw: PickleRecord) -> set[Any]:
        (values,) = raw.args
        if type(values) is not list:
            raise ValueError
        return set(self.keys(values))

    def bytes(self, raw: PickleRecord) -> bytes:
        text, encoding = raw.args
        if type(text) is not str or encoding != "latin1":
            raise ValueError
        if id(text) not in self.encoded:  # one text may be made bytes many times
            self.encoded[id(text)] = text.encode("latin1")
        return self.encoded[id(text)]

    def size(self, raw: PickleRecord) -> torch.Size:
        return size_of(raw)

    def device(self, raw: PickleRecord) -> torch.device:
        if not all(type(arg) is str or _is_count(arg) for arg in raw.args):
            raise ValueError
        return torch.device(*raw.args)


def size_of(raw: object) -> torch.Size:
    """The `torch.Size` that a record stands for.

    Raises:
        ValueError: it stands for none.
    """
    if type(raw) is not PickleRecord or raw.name != "torch.Size" or raw.args is None or raw.state is not None:
        raise ValueError("no torch.Size")
    (dims,) = raw.args or ((),)
    if not _are_counts(dims):
        raise ValueError("a torch.Size that is none")
    return torch.Size(dims)


def is_shape(value: object) -> bool:
    """Whether sizes, of any types, can be those of a tensor: so many elements can be counted, and where there are none,
    the other dims are not so large that whoever walks them does not come to an end."""
    if not _are_counts(value):
        return False
    extent = math.prod(size for size in value if size)  # type: ignore[attr-defined]
    return extent <= (EMPTY_EXTENT if 0 in value else _MOST)  # type: ignore[operator]


def _name(raw: object) -> str:
    """The name of what stands for itself."""
    if type(raw) is not PickleRecord or raw.args is not None:
        raise ValueError
    return raw.name


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and len(values) <= _DIMS and all(map(_is_count, values))


_MAKERS: dict[str, Callable[[_ValueDecoder, PickleRecord], Any]] = {
    _TENSOR: _ValueDecoder.tensor,
    _TENSOR_OF_DTYPE: _ValueDecoder.tensor,
    _PARAMETER: _ValueDecoder.parameter,
    _ORDERED: _ValueDecoder.ordered,
    "torch.Size": _ValueDecoder.size,
    "torch.device": _ValueDecoder.device,
    "_codecs.encode": _ValueDecoder.bytes,
    "builtins.set": _ValueDecoder.set,
    "__builtin__.set": _ValueDecoder.set,
}
_NAMES = {*_MAKERS, *DTYPES, *_TYPED_STORAGES, _UNTYPED}
