"""An fsspec file system of the tests, at shelf:///some/folder: a folder that behaves as object stores do.

Files appear when they are closed, there is no renaming and there are no empty folders, what was listed once is believed
until it is told not to be, and errors are of a class of its own.
"""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

SCHEME = "shelf://"


class ClientError(Exception):
    """As the clients of object stores raise: no OSError, and more than one line."""


class Shelf(LocalFileSystem):
    """Each process has one, with listings of its own."""

    protocol = "shelf"
    fails_at: tuple[str, ...] = ()
    """What is refused: "read", "write"."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listed: dict[str, list[str]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix(SCHEME))

    def _refuse(self, kind: str) -> None:
        if kind in self.fails_at:
            raise ClientError(f"403: you may not {kind}\nRequestId: 7")

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no folders."""

    mkdir = makedirs
    mv = AbstractFileSystem.mv

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._refuse("read")
        found = super().ls(path, detail=detail, **options)
        self.listed[self._strip_protocol(path)] = super().ls(path, detail=False)
        return found

    def info(self, path: Any, **options: Any) -> Any:
        self._refuse("read")
        if isinstance(path, str):
            place = self._strip_protocol(path)
            believed = self.listed.get(self._parent(place))
            if believed is not None and place not in believed:
                raise FileNotFoundError(place)
        return super().info(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._refuse("write" if "w" in mode else "read")
        if "w" in mode:
            os.makedirs(self._parent(path), exist_ok=True)
        return super()._open(path, mode, **options)


fsspec.register_implementation("shelf", Shelf, clobber=True)
