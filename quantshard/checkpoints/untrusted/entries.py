"""Reads one entry of an untrusted `.distcp` file: a tensor or a plain object as `torch.save` writes it.

An entry is a zip archive of uncompressed records: a pickle, and the bytes of each storage. `pickles` decodes the
pickle. Each tensor must lie within its storage, and a storage has the bytes of its record, so no more is allocated than
the file holds. Checksums of records, which `torch.load` ignores, are verified too.

Values of the caller are also read back here before they are written, so that only readable values are saved.
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
"""Every dtype by its full name; aliases such as `torch.half` are listed as `torch.float16`."""

NO_TENSORS = frozenset(dtype for name, dtype in DTYPES.items() if re.fullmatch(r"torch\.(q\w+|u?int[1-7])", name))
"""Dtypes that a plain copy of a tensor does not support: quantized integers, and integers below 8 bits."""

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

# Bytes before the name of a record.
_LOCAL_HEADER = 30
_DEPTH, _DIMS = 32, 64
_MOST = 1 << 62
EMPTY_EXTENT = 1 << 24
"""Upper bound on the product of the nonzero dims of a tensor without elements."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call in a file that was not executed: `name`, arguments, and the state that it would set."""

    name: str
    args: tuple[Any, ...]
    state: Any


def read_entry(file: BinaryIO, offset: int, length: int, calls: Collection[str] = ()) -> Any:
    """Read the tensor or object in `length` bytes of a file.

    Supported values: None, numbers, strings, bytes, lists, tuples, sets, dicts, `torch.Size`, dtypes, devices, and CPU
    tensors.

    Args:
        calls: names ("module.name") of classes and functions of other libraries that are returned as `RecordedCall`.

    Raises:
        NeedsCodeError: the entry holds anything else.
        CheckpointError: the entry is damaged, or claims more than its bytes hold.
        OSError: the file cannot be read.
    """
    archive = _Archive(file, offset, length)
    content = archive.record("data.pkl", OBJECT_BYTES)
    return _ValueDecoder(archive, calls).value(pickles.load_pickle(content, {*_NAMES, *calls}))


def checked_entry(what: str, value: Any) -> tuple[bytes, Any]:
    """Return the bytes of an entry to write, and the value that `read_entry` makes of them.

    Raises:
        ConfigurationError: the value could not be read back; the message locates the part of `what` that cannot be
            saved.
    """
    try:
        return _written_and_read(value)
    # The caller's objects can raise anything while they are saved.
    except Exception as error:
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
    """Find the innermost part that cannot be read back: its description, the part, and its error."""
    parts = dict(enumerate(value)) if type(value) in (list, tuple) else value
    if isinstance(parts, dict) and depth < _DEPTH:
        for key, part in parts.items():
            try:
                _written_and_read(part)
            except Exception as part_error:
                return _culprit(f"{what}[{key!r}]", part, part_error, depth + 1)
    return what, value, error


class _FileSlice(io.RawIOBase):
    """A range of bytes of a file, as a file."""

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
        """Read a header or the list of records; bounded, because `zipfile` makes an object for each record."""
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
    """The records of one entry; each is validated when it is read."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.slice, self.length = _FileSlice(file, offset, length), length
        try:
            records = zipfile.ZipFile(self.slice).infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError, OverflowError) as error:
            raise CheckpointError(f"it is no whole archive of torch.save ({error})") from error
        self.records = {record.filename.partition("/")[2]: record for record in records}
        if len(self.records) != len(records):
            raise CheckpointError("its archive has two records of one name")
        if sum(record.file_size for record in records) > length:
            raise CheckpointError(f"its records claim more than its {length} bytes")
        if "byteorder" in self.records and self.record("byteorder") != b"little":
            raise CheckpointError("it was written on a big-endian machine")

    def record(self, name: str, limit: int = 1 << 16) -> bytes:
        """Read a record of at most `limit` bytes."""
        if name in self.records and self.records[name].file_size > limit:
            raise CheckpointError(
                f"its {name} has more than the {limit} bytes that are read of it; save what is large as tensors"
            )
        return self.storage(name).numpy().tobytes()

    def storage(self, name: str) -> Tensor:
        """Read a record as uint8 [n] in memory of its own."""
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
        content = torch.empty(info.file_size, dtype=torch.uint8, device="cpu")
        view, position = content.numpy().data, 0
        self.slice.seek(start)
        while position < len(view) and (count := self.slice.readinto(view[position:])):
            position += count
        # A CRC of 0: torch.save was configured to write none.
        if position < len(view) or (info.CRC and zlib.crc32(view) != info.CRC):
            raise CheckpointError(f"its record {name[:80]!r} is damaged: it is cut short or has another checksum")
        return content


class _ValueDecoder:
    """Converts the records of a pickle to plain values and tensors."""

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
        value = self._container(raw)
        self.depth -= 1
        return value

    def keys(self, raw: Iterable[Any]) -> list[Any]:
        """Decode and check keys of a dict or set."""
        keys = list(map(self.value, raw))
        pickles.check_keys(keys)
        return keys

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
        # Attributes, such as a module sets on its state dict, are dropped.
        return OrderedDict(self.value(raw.items or {}))

    def tensor(self, raw: PickleRecord) -> Tensor:
        pid, offset, size, stride = raw.args[:4]
        has_typed_storage = raw.name == _TENSOR
        extra_args = raw.args[6:] if has_typed_storage else raw.args[7:]
        if any(extra_args) or not (_is_count(offset) and is_shape(size) and _are_counts(stride)):
            raise ValueError
        dtype, storage = self._storage(pid, None if has_typed_storage else DTYPES[_name(raw.args[6])])
        if len(size) != len(stride) or dtype in NO_TENSORS:
            raise ValueError
        last_index = (
            offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else -1
        )
        if math.prod(size) * dtype.itemsize > storage.numel() or (last_index + 1) * dtype.itemsize > storage.numel():
            raise CheckpointError(f"its tensor of shape {list(size)} does not lie within its {storage.numel()} bytes")
        elements = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return elements.as_strided(size, stride, offset if math.prod(size) else 0)

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
        value = self.value(raw.args[0])
        if not isinstance(value, Tensor):
            raise ValueError
        return value

    def set(self, raw: PickleRecord) -> set[Any]:
        (values,) = raw.args
        if type(values) is not list:
            raise ValueError
        return set(self.keys(values))

    def bytes(self, raw: PickleRecord) -> bytes:
        text, encoding = raw.args
        if type(text) is not str or encoding != "latin1":
            raise ValueError
        # A file can refer to one text many times.
        if id(text) not in self.encoded:
            self.encoded[id(text)] = text.encode("latin1")
        return self.encoded[id(text)]

    def size(self, raw: PickleRecord) -> torch.Size:
        return size_of(raw)

    def device(self, raw: PickleRecord) -> torch.device:
        if not all(type(arg) is str or _is_count(arg) for arg in raw.args):
            raise ValueError
        return torch.device(*raw.args)


def size_of(raw: object) -> torch.Size:
    """Return the `torch.Size` that a record represents.

    Raises:
        ValueError: the record is not a valid `torch.Size`.
    """
    if type(raw) is not PickleRecord or raw.name != "torch.Size" or raw.args is None or raw.state is not None:
        raise ValueError("no torch.Size")
    (dims,) = raw.args or ((),)
    if not _are_counts(dims):
        raise ValueError("a torch.Size that is none")
    return torch.Size(dims)


def is_shape(value: object) -> bool:
    """Whether sizes of any type are a valid tensor shape.

    The number of elements must be countable. Without elements, the other dims must be small enough to iterate over.
    """
    if not _are_counts(value):
        return False
    extent = math.prod(size for size in value if size)  # type: ignore[attr-defined]
    return extent <= (EMPTY_EXTENT if 0 in value else _MOST)  # type: ignore[operator]


def _name(raw: object) -> str:
    """Name of a record without a call, such as a dtype."""
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
