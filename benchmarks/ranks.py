"""Processes, one for each GPU, that measure one thing and end: what it leaves behind is no matter of the next.

One that fails, hangs or runs out of memory ends alone: the others, which may wait for it in a collective, are killed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

IMPORTED = ["torch._dynamo", "torch.distributed.fsdp", "quantshard"]
"""Once, by the process that all are forked from."""
ENDING = 10.0
"""Seconds that idle processes have to end."""

Row = dict[str, Any]
Measure = Callable[..., Row]
"""Of the mesh of all processes, or None of one alone, and of what it is given."""


class RankFailure(Exception):
    """What one rank raised, in a line."""


class OutOfTime(Exception):
    """No rank failed, and not all answered."""


class Ranks:
    """`size` processes on a device; `measure` is of a module, and picklable."""

    def __init__(self, size: int, device: str, measure: Measure) -> None:
        self.size, self.device, self.measure = size, device, measure
        self.folders = ExitStack()
        self.ranks = list[tuple[Connection, Any]]()

    def ask(self, seconds: float, *request: Any) -> list[Row]:
        """The rows of all ranks.

        Raises:
            RankFailure: one of them raised, or ended.
            OutOfTime: it takes longer.
        """
        rows: dict[int, Row] = {}
        try:
            self._start()
            for pipe, _ in self.ranks:
                pipe.send(request)
            self._receive(rows, time.monotonic() + seconds)
        except BaseException:
            self._kill()
            raise
        self.stop()
        return [rows[rank] for rank in range(self.size)]

    def _receive(self, rows: dict[int, Row], until: float) -> None:
        pipes = {pipe: rank for rank, (pipe, _) in enumerate(self.ranks)}
        while len(rows) < self.size:
            ready = wait([pipe for pipe, rank in pipes.items() if rank not in rows], max(0.0, until - time.monotonic()))
            if not ready:
                raise OutOfTime
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    row = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    process = self.ranks[rank][1]
                    process.join(10)
                    raise RankFailure(f"process {rank} ended with {process.exitcode}") from None
                if isinstance(row, str):
                    raise RankFailure(row)
                rows[rank] = row

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        meeting = str(Path(self.folders.enter_context(tempfile.TemporaryDirectory())) / "meeting")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, self.device, meeting, self.measure, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((ours, process))

    def stop(self) -> None:
        """End all processes, which wait for work."""
        for pipe, _ in self.ranks:
            pipe.close()
        for _, process in self.ranks:
            process.join(ENDING)
        self._kill()

    def _kill(self) -> None:
        """End all processes, whatever they do."""
        for pipe, process in self.ranks:
            pipe.close()
            process.kill()
        for _, process in self.ranks:
            process.join()
        self.ranks.clear()
        self.folders.close()


def _serve(rank: int, size: int, device: str, meeting: str, measure: Measure, pipe: Connection) -> None:
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        mesh: DeviceMesh | None = None
        if size > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
            mesh = init_device_mesh(device, (size,))
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                break
            pipe.send(measure(mesh, *request))
        if mesh is not None:
            dist.destroy_process_group()
    except BaseException as error:
        first = str(error).strip().splitlines() or [""]
        pipe.send(f"{type(error).__name__}: {first[0][:300]}")
