"""Measure a function in fresh processes, one per GPU.

A request starts its own processes, so its leftovers never affect the next one. If a rank fails, hangs or
runs out of memory, all ranks of the request are killed, including those that wait for it in a collective.
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

PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "quantshard"]
"""Modules that the fork server imports once for all processes."""
EXIT_SECONDS = 10.0
"""Time that idle processes have to exit before they are killed."""

Row = dict[str, Any]
Measure = Callable[..., Row]
"""Takes the mesh of all ranks (None: one rank) and the arguments of a request."""


class RankFailure(Exception):
    """A rank raised or exited; the message is one line."""


class OutOfTime(Exception):
    """No rank failed, but some did not answer in time."""


class Ranks:
    """`size` processes on a type of device that run `measure`, a picklable module-level function."""

    def __init__(self, size: int, device: str, measure: Measure) -> None:
        self.size, self.device, self.measure = size, device, measure
        self.folders = ExitStack()
        self.ranks = list[tuple[Connection, Any]]()

    def run(self, seconds: float, *request: Any) -> list[Row]:
        """Run `measure` in new processes and return the rows of all ranks.

        Raises:
            RankFailure: a rank raised or exited.
            OutOfTime: the ranks took longer than `seconds`.
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

    def _receive(self, rows: dict[int, Row], deadline: float) -> None:
        pipes = {pipe: rank for rank, (pipe, _) in enumerate(self.ranks)}
        while len(rows) < self.size:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in rows]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise OutOfTime
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                try:
                    row = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    process = self.ranks[rank][1]
                    process.join(EXIT_SECONDS)
                    raise RankFailure(f"process {rank} ended with {process.exitcode}") from None
                if isinstance(row, str):
                    raise RankFailure(row)
                rows[rank] = row

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        rendezvous = str(Path(self.folders.enter_context(tempfile.TemporaryDirectory())) / "rendezvous")
        for rank in range(self.size):
            parent_end, child_end = context.Pipe()
            args = (rank, self.size, self.device, rendezvous, self.measure, child_end)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            child_end.close()
            self.ranks.append((parent_end, process))

    def stop(self) -> None:
        """Close the pipes of idle processes, so that they exit."""
        for pipe, _ in self.ranks:
            pipe.close()
        for _, process in self.ranks:
            process.join(EXIT_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for pipe, process in self.ranks:
            pipe.close()
            process.kill()
        for _, process in self.ranks:
            process.join()
        self.ranks.clear()
        self.folders.close()


def _serve(rank: int, size: int, device: str, rendezvous: str, measure: Measure, pipe: Connection) -> None:
    """Answer requests until the pipe is closed; an exception is sent as a line of text."""
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        mesh: DeviceMesh | None = None
        if size > 1:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
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
        lines = str(error).strip().splitlines() or [""]
        pipe.send(f"{type(error).__name__}: {lines[0][:300]}")
