"""Tokenizes a source into shards: in parallel, with atomic writes, and resumable.

The texts of a shard depend only on the source and the options (`texts.divide`), so any number of processes writes the
same files. The calling process keeps a journal with one line per finished shard. A later call with the same source,
tokenizer and options writes the missing shards. At the end the index replaces the journal.
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
"""Bytes of text per shard."""

_AT_ONCE = 1 << 20
"""Characters per call of the tokenizer."""

_MOST_SHARDS = 100_000
_JOURNAL_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizeJob:
    """The inputs of all shards of a source. `tokenizer`, `end_of_document`, `digest`: arguments of `load_tokenizer`."""

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
        tokenizer: tokenizer of the texts.
        path: path of the tokenizer's files; "" for bytes.
        options: location of the texts.
        shard_bytes: bytes of text per shard.

    `key`: digest of all inputs of the shards. The constructor reads the source to compute it.
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
        """Write the missing shards, then the index, to a new folder or one with unfinished shards of the same inputs.

        `processes`: number of processes; 0: one per CPU.

        Raises:
            ConfigurationError: the folder holds other files, a text cannot be read, or there is no text.
        """
        _check_folder(folder)
        parts = self._parts()
        outputs.make_folder(folder)
        try:
            lock = ownership.lock(folder)
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be locked, or another process writes tokens there: {error.strerror or error}"
            ) from None
        try:
            return self._written(folder, parts, processes or _cpus())
        finally:
            if lock is not None:
                lock.release()

    def _parts(self) -> tuple[tuple[Piece, ...], ...]:
        if self.source.size > self.shard_bytes * _MOST_SHARDS:
            raise ConfigurationError(
                f"{self.source.path} has {self.source.size} bytes, which would be more than {_MOST_SHARDS} shards of "
                f"{self.shard_bytes}; take a larger --shard-size"
            )
        return tuple(tuple(part) for part in divide(self.source, self.shard_bytes, self.options))

    def _written(self, folder: Path, parts: tuple[tuple[Piece, ...], ...], processes: int) -> ShardIndex:
        if os.path.lexists(folder / INDEX):
            index_on_disk = read_index(folder)
            self._check_key(folder, index_on_disk.key)
            index_on_disk.sizes(folder)
            return index_on_disk
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
        """Return the shards that an earlier call has finished, by number; start a journal if there is none."""
        done: dict[int, ShardEntry] = {}
        if not os.path.lexists(folder / JOURNAL):
            outputs.write_file(folder / JOURNAL, json.dumps({"key": self.key}) + "\n", within=folder)
            return done
        first, *lines = read_regular(folder / JOURNAL, _JOURNAL_BYTES).split(b"\n")
        self._check_key(folder, str(_record(first).get("key")))
        width = TOKEN_DTYPES[token_dtype(self.tokenizer.vocabulary)].itemsize
        for record in map(_record, lines):
            number = record.pop("part", None)
            if type(number) is not int or not 0 <= number < parts:
                # a line that was cut off
                continue
            entry = shard_entry(record, str(folder / JOURNAL))
            with suppress(OSError):
                if entry.file == _name(number) and (folder / entry.file).stat().st_size == entry.tokens * width:
                    done[number] = entry
        if done:
            screen.say(f"{folder} has {len(done)} shards already; going on with the others")
        if lines[-1:] != [b""]:
            outputs.append_text(folder / JOURNAL, "\n", within=folder)
        return done


def _cpus() -> int:
    """Return the number of CPUs that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_folder(folder: Path) -> None:
    """Refuse a folder that contains anything except tokens."""
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
    """Yield shards as they are finished, with a progress bar in a terminal."""
    sizes = {number: sum(piece.size for piece in job.parts[number]) for number in missing}
    console = screen.Screen()
    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(sizes.values()))
        num_processes = min(processes, len(missing))
        finished = 0
        for number, entry in (
            _in_processes(job, missing, num_processes)
            if num_processes > 1
            else _here(job, missing, lambda count: bar.advance(task, count))
        ):
            finished += sizes[number]
            bar.update(task, completed=finished)
            yield number, entry


def _here(job: TokenizeJob, missing: set[int], told: Callable[[int], object]) -> Iterator[tuple[int, ShardEntry]]:
    """Write shards in this process; the tokenizers library has its own threads."""
    for number in sorted(missing):
        yield number, make_shard(job, number, told)


def _in_processes(job: TokenizeJob, missing: set[int], processes: int) -> Iterator[tuple[int, ShardEntry]]:
    # fork would lose this process's threads
    context = multiprocessing.get_context("spawn")
    other_children = set(multiprocessing.active_children())
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
    # after an error or Ctrl-C, do not wait for running work
    except BaseException:
        for process in set(multiprocessing.active_children()) - other_children:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _importing_nothing_here() -> Iterator[None]:
    """Start processes in the root folder, because Python 3.10 puts the working directory first in their import path."""
    folder = os.getcwd()
    # multiprocessing restores the working directory in each process later
    os.chdir(os.sep)
    try:
        yield
    finally:
        os.chdir(folder)


def _begin(parent: int) -> None:
    """Set up a worker process: one thread, ignore Ctrl-C, exit with the parent."""
    # the parent was killed while this process started
    if os.getppid() != parent:
        end_at_once(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch.die_with_parent()


def make_shard(job: TokenizeJob, number: int, told: Callable[[int], object] = lambda count: None) -> ShardEntry:
    """Write one shard. `told`: called with the number of characters done.

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
    """Load the tokenizer, once per process."""
    return load_tokenizer(path, end_of_document, digest if path else "")


def _whole_chunks(job: TokenizeJob, number: int) -> Iterator[Chunk]:
    """Yield the chunks of a part; lone surrogates, which no encoding can represent, are replaced."""
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
    """Yield the tokens of chunks, and whether a document ends after them. Whole documents are encoded in batches."""
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
    """Yield the tokens of documents in overlapping chunks; equal to encoding each document in one call.

    The first and last tokens of a chunk depend on where it was cut. Two chunks are therefore joined inside their
    overlap, at a position where tokens of both start, at the boundary or after it.
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
        # relative to the next boundary
        starts -= length
        seam -= length


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
