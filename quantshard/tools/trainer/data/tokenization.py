"""A source made into token shards: in parallel, each shard in one move, and gone on with after a stop.

Which texts a shard holds follows from the source and the options alone (`texts.divide`), so any number of processes
makes the same files. The process that was called writes a journal, one line for each shard that is finished; the next
call with the same source, tokenizer and options makes those that are missing. The index takes the journal's place at
the end.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from os import _exit as end_at_once
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from quantshard.checkpoints.disk import ownership
from quantshard.errors import ConfigurationError
from quantshard.foreign import read_regular
from quantshard.tools.terminal import outputs, screen
from quantshard.tools.trainer import launch
from quantshard.tools.trainer.data.documents import TOKEN_DTYPES, read_document, token_dtype
from quantshard.tools.trainer.data.finding import INDEX, JOURNAL, DataSource
from quantshard.tools.trainer.data.shards import TOKENIZER, ShardEntry, ShardIndex, read_index, shard_entry
from quantshard.tools.trainer.data.texts import Chunk, Piece, TextOptions, chunks, divide
from quantshard.tools.trainer.data.tokenizer import Tokenizer, end_text, load_tokenizer, tokenizer_contents

SHARD_BYTES = 100_000_000
"""Bytes of the texts of one shard."""

_AT_ONCE = 1 << 20
"""Characters that a tokenizer is given at once."""

_MOST_SHARDS = 100_000
_JOURNAL_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizeJob:
    """What makes a shard of each part of a source: `tokenizer`, `end_of_document`, `digest` are those of
    `load_tokenizer`."""

    folder: str
    kind: str
    parts: tuple[tuple[Piece, ...], ...]
    options: TextOptions
    tokenizer: str
    end_of_document: str
    digest: str


class ShardedSource:
    """A source as token shards in a folder.

    Args:
        source: texts of any kind.
        tokenizer: what makes tokens of them.
        path: where its files are; "" of bytes.
        options: where texts are found.
        shard_bytes: bytes of texts that become one shard.

    `key`: the digest of all that the shards follow from. Reads the source, for its digest.
    """

    def __init__(
        self, source: DataSource, tokenizer: Tokenizer, path: str, options: TextOptions, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.source, self.tokenizer, self.path = source, tokenizer, path
        self.options, self.shard_bytes = options, shard_bytes
        documents = [read_document(file, size).line for file, size in source.files]
        facts = [source.kind, documents, tokenizer.digest, tokenizer.end_of_document, options, shard_bytes]
        self.key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def write(self, folder: Path, processes: int = 0) -> ShardIndex:
        """Make the shards that are missing, and then the index, in a folder that is new or was begun with these.

        `processes`: 0 is one for each CPU.

        Raises:
            ConfigurationError: the folder holds anything else, a text cannot be read, or there is none.
        """
        _check_folder(folder)
        parts = self._parts()
        outputs.make_folder(folder)
        try:
            lock = ownership.lock(folder)
        except (BlockingIOError, OSError) as error:
            raise ConfigurationError(
                f"{folder} cannot be locked, or another process writes tokens there: {error.strerror or error}"
            ) from None
        try:
            return self._written(folder, parts, processes or _cpus())
        finally:
            if lock is not None:
                lock.close()

    def _parts(self) -> tuple[tuple[Piece, ...], ...]:
        if self.source.size > self.shard_bytes * _MOST_SHARDS:
            raise ConfigurationError(
                f"{self.source.path} has {self.source.size} bytes, which would be more than {_MOST_SHARDS} shards of "
                f"{self.shard_bytes}; take a larger --shard-size"
            )
        return tuple(tuple(part) for part in divide(self.source, self.shard_bytes, self.options))

    def _written(self, folder: Path, parts: tuple[tuple[Piece, ...], ...], processes: int) -> ShardIndex:
        if os.path.lexists(folder / INDEX):
            found = read_index(folder)
            self._check_key(folder, found.key)
            found.sizes(folder)
            return found
        done = self._resumed(folder, len(parts))
        tokenizer = self.tokenizer
        job = TokenizeJob(
            str(folder), self.source.kind, parts, self.options, self.path, end_text(tokenizer), tokenizer.digest
        )
        for number, entry in _made(job, set(range(len(parts))) - set(done), processes):
            done[number] = entry
            outputs.append_text(folder / JOURNAL, json.dumps({"part": number, **asdict(entry)}) + "\n", within=folder)
        index = ShardIndex(
            self.key, tokenizer.digest, tokenizer.vocabulary, tokenizer.end_of_document, end_text(tokenizer),
            token_dtype(tokenizer.vocabulary), tuple(done[number] for number in sorted(done)),
        )  # fmt: skip
        if not index.documents:
            raise ConfigurationError(f"there is no text in {self.source.path}")
        if self.path:
            for name, content in tokenizer_contents(self.path).items():
                outputs.write_file(folder / TOKENIZER / name, content, within=folder)
        outputs.write_file(folder / INDEX, json.dumps(index.content(), indent=1) + "\n", within=folder)
        outputs.remove_unfinished(folder, JOURNAL)
        return index

    def _check_key(self, folder: Path, key: str) -> None:
        if key != self.key:
            raise ConfigurationError(
                f"{folder} holds tokens of other data, of another tokenizer or other options; name another folder, or "
                "remove it"
            )

    def _resumed(self, folder: Path, parts: int) -> dict[int, ShardEntry]:
        """The shards that an earlier call has finished, by number; begins a journal if there is none."""
        found: dict[int, ShardEntry] = {}
        if not os.path.lexists(folder / JOURNAL):
            outputs.write_file(folder / JOURNAL, json.dumps({"key": self.key}) + "\n", within=folder)
            return found
        first, *lines = read_regular(folder / JOURNAL, _JOURNAL_BYTES).split(b"\n")
        self._check_key(folder, str(_record(first).get("key")))
        width = TOKEN_DTYPES[token_dtype(self.tokenizer.vocabulary)].itemsize
        for record in map(_record, lines):
            number = record.pop("part", None)
            if type(number) is not int or not 0 <= number < parts:
                continue  # the line that was being written
            entry = shard_entry(record, str(folder / JOURNAL))
            with suppress(OSError):
                if entry.file == _name(number) and (folder / entry.file).stat().st_size == entry.tokens * width:
                    found[number] = entry
        if found:
            screen.say(f"{folder} has {len(found)} shards already; going on with the others")
        if lines[-1:] != [b""]:
            outputs.append_text(folder / JOURNAL, "\n", within=folder)
        return found


def _cpus() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_folder(folder: Path) -> None:
    """See that nothing but tokens is in a folder."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} exists and is no folder; name another --out")
    names = {path.name for path in folder.iterdir()}
    if names - {ownership.LOCK_FILE} and not names & {INDEX, JOURNAL}:
        raise ConfigurationError(f"{folder} exists and holds other files; name a new folder with --out")


def _record(line: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return {}


def _name(number: int) -> str:
    return f"{number:05d}.bin"


# The work -------------------------------------------------------------------------------------------------------------


def _made(job: TokenizeJob, missing: set[int], processes: int) -> Iterator[tuple[int, ShardEntry]]:
    """The shards as they are finished, with a bar in a terminal."""
    sizes = {number: sum(piece.size for piece in job.parts[number]) for number in missing}
    console = screen.Screen()
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(sizes.values()))
        at_once = min(processes, len(missing))
        finished = 0
        for number, entry in (
            _in_processes(job, missing, at_once)
            if at_once > 1
            else _here(job, missing, lambda count: bar.advance(task, count))
        ):
            finished += sizes[number]
            bar.update(task, completed=finished)
            yield number, entry


def _here(job: TokenizeJob, missing: set[int], told: Callable[[int], object]) -> Iterator[tuple[int, ShardEntry]]:
    """In this process; the tokenizers library has threads of its own."""
    for number in sorted(missing):
        yield number, make_shard(job, number, told)


def _in_processes(job: TokenizeJob, missing: set[int], processes: int) -> Iterator[tuple[int, ShardEntry]]:
    context = multiprocessing.get_context("spawn")  # this process has threads, of which a fork has none
    others = set(multiprocessing.active_children())
    with _importing_nothing_here():
        pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(),))
    try:
        with _importing_nothing_here():
            futures = {pool.submit(make_shard, job, number): number for number in sorted(missing)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ConfigurationError(
            "a process that made tokens was killed, perhaps for want of memory; give the same command again, with "
            "fewer --processes"
        ) from None
    except BaseException:  # an error, or Ctrl-C: what they are at is not waited for
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _importing_nothing_here() -> Iterator[None]:
    """Start processes in the root folder: Python 3.10 puts the working directory first in the path of their imports."""
    folder = os.getcwd()
    os.chdir(os.sep)  # multiprocessing has each process return to the working directory later
    try:
        yield
    finally:
        os.chdir(folder)


def _begin(parent: int) -> None:
    """In each process: one thread, no part in Ctrl-C, and no life without the one that asks."""
    if os.getppid() != parent:  # it was killed while this one started
        end_at_once(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch.die_with_parent()


def make_shard(job: TokenizeJob, number: int, told: Callable[[int], object] = lambda count: None) -> ShardEntry:
    """Make one shard. `told`: how many characters were done.

    Raises:
        ConfigurationError: a text cannot be read, or the shard cannot be written.
    """
    tokenizer = _tokenizer(job.tokenizer, job.end_of_document, job.digest)
    kind = TOKEN_DTYPES[token_dtype(tokenizer.vocabulary)]
    folder, digest, tokens, documents = Path(job.folder), hashlib.sha256(), 0, 0
    with outputs.written_file(folder / _name(number), within=folder) as file:
        for ids, is_end in _encoded(tokenizer, _whole_chunks(job, number), told):
            values = np.empty(len(ids) + is_end, kind)
            values[: len(ids)] = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else ids
            values[len(ids) :] = tokenizer.end_of_document
            digest.update(values.data)
            try:
                file.write(values.data)
            except OSError as error:
                raise ConfigurationError(f"cannot write {folder / _name(number)}: {error.strerror}") from None
            tokens, documents = tokens + len(values), documents + is_end
    return ShardEntry(_name(number), tokens, documents, digest.hexdigest())


@lru_cache(1)
def _tokenizer(path: str, end_of_document: str, digest: str) -> Tokenizer:
    """Once in each process."""
    return load_tokenizer(path, end_of_document, digest if path else "")


def _whole_chunks(job: TokenizeJob, number: int) -> Iterator[Chunk]:
    """The chunks of a part; halves of surrogate pairs, which no encoding has, are replaced."""
    replaced = 0
    for piece in job.parts[number]:
        for chunk in chunks(job.kind, piece, job.options):
            text = _without_surrogates(chunk.text)
            replaced += text is not chunk.text
            yield chunk._replace(text=text)
    if replaced:
        warnings.warn(
            f"{job.parts[number][0].file}: {replaced} texts have halves of surrogate pairs, which are no characters; "
            "U+FFFD stands for them",
            stacklevel=2,
        )


def _encoded(
    tokenizer: Tokenizer, pieces: Iterable[Chunk], told: Callable[[int], object]
) -> Iterator[tuple[Sequence[int], bool]]:
    """The tokens of chunks, and whether a document ends after them. Whole documents are encoded several at once."""
    for is_whole, group in groupby(pieces, lambda chunk: chunk.ends and not chunk.before):
        if not is_whole:
            yield from _joined(tokenizer, group, told)
            continue
        for texts in _batches(chunk.text for chunk in group):
            told(sum(map(len, texts)))
            yield from ((ids, True) for ids in tokenizer.encode(texts))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _joined(
    tokenizer: Tokenizer, pieces: Iterable[Chunk], told: Callable[[int], object]
) -> Iterator[tuple[Sequence[int], bool]]:
    """The tokens of documents in overlapping chunks, which are those of each document encoded at once.

    A chunk's first and last tokens depend on where it was cut. So two chunks are joined inside their overlap: where a
    token of both begins, at the boundary or after it.
    """
    ids, starts, seam = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for chunk in pieces:
        encoded = tokenizer.encode_with_starts(chunk.text)
        new_ids, new_starts = (np.array(list(values), np.int64) for values in encoded)
        new_starts -= chunk.before
        new_seam = 0
        if chunk.before:
            common = np.intersect1d(starts, new_starts)
            new_seam = int(min(common[common >= max(0, seam)], default=max(0, seam)))
            yield ids[(starts >= seam) & (starts < new_seam)].tolist(), False
        ids, starts, seam = new_ids, new_starts, new_seam
        if chunk.ends:
            yield ids[starts >= seam].tolist(), True
        length = len(chunk.text) - chunk.before - chunk.after
        told(length)
        starts -= length  # relative to the next boundary
        seam -= length


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
