"""The synchronous SDK: the asynchronous one, driven by one background event loop.

Guarantee: coroutines become calls that block, asynchronous iterators and context managers become plain ones, and
objects of the SDK (and streams to a port) that are returned are wrapped again; everything else passes through as it is.

::

    from sandbox.sync import Client

    with Client() as host, host.create("debian") as sb:
        print(sb.exec("uname -a").text)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from sandbox.sdk import (
    client,
    files,
    gateway,
    handle,
    images,
    network,
    ports,
    processes,
    run,
    services,
    sessions,
    store,
    turns,
)

__all__ = [
    "Client",
    "CommandStream",
    "Conversation",
    "Files",
    "Fork",
    "Models",
    "Networking",
    "Ports",
    "Process",
    "Processes",
    "Run",
    "Sandbox",
    "ServiceHandle",
    "Services",
    "Session",
    "Sessions",
    "Store",
    "Terminal",
    "Terminals",
    "Turn",
]


P = ParamSpec("P")
T = TypeVar("T")


class _Loop:
    """One event loop in a thread of its own, shared by all proxies of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[T]) -> T:
        """Run to its end and return what it returned. Not from the loop's own thread."""

        async def body() -> T:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(body(), self._started())
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted: nothing keeps running behind the caller

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="sandbox.sync", daemon=True).start()
            return self._loop


_loop = _Loop()
_proxies: dict[type, type[_Proxy]] = {}


class _Proxy:
    """A synchronous view of `_original`."""

    def __init__(self, original: object) -> None:
        self._original: Any = original

    def __repr__(self) -> str:
        return repr(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _wrapped(getattr(self._original, name))


def _wrapped(value: object) -> Any:
    if type(value) in _proxies:
        proxy = object.__new__(_proxies[type(value)])
        proxy._original = value
        return proxy
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_wrapped(item) for item in value)
    if inspect.isawaitable(value):
        return _wrapped(_loop.run(value))
    if isinstance(value, AsyncIterator):
        return _iterate(value)
    if isinstance(value, AbstractAsyncContextManager):
        return _entered(value)
    return value


@contextlib.contextmanager
def _entered(manager: AbstractAsyncContextManager[object]) -> Iterator[Any]:
    """A context manager that is no handle, such as a forwarded port."""
    entered = _loop.run(manager.__aenter__())
    with contextlib.ExitStack() as stack:
        stack.push(lambda *error: _loop.run(manager.__aexit__(*error)))
        yield _wrapped(entered)


def _iterate(source: AsyncIterator[object]) -> Iterator[Any]:
    try:
        while True:
            try:
                yield _wrapped(_loop.run(anext(source)))
            except StopAsyncIteration:
                return
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            _loop.run(close())


def _next(self: _Proxy) -> Any:
    try:
        return _wrapped(_loop.run(anext(self._original)))
    except StopAsyncIteration:
        raise StopIteration from None


def _method(function: Callable[Concatenate[Any, P], object]) -> Callable[Concatenate[_Proxy, P], Any]:
    @functools.wraps(function)
    def call(self: _Proxy, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        async def made() -> Any:  # on the loop: what it makes may look for the running loop
            result = function(self._original, *args, **kwargs)
            return await result if inspect.iscoroutine(result) else result

        return _wrapped(_loop.run(made()))

    return call


def _proxy(original: type) -> type[_Proxy]:
    """The synchronous class of an asynchronous one."""

    def __init__(self: _Proxy, *args: object, **kwargs: object) -> None:
        self._original = original(*args, **kwargs)

    def __enter__(self: _Proxy) -> Any:
        entered = _loop.run(self._original.__aenter__())
        return self if entered is self._original else _wrapped(entered)

    def __exit__(self: _Proxy, *error: object) -> None:
        _loop.run(self._original.__aexit__(*error))

    body: dict[str, Any] = {"__doc__": original.__doc__, "__init__": __init__, "__module__": __name__}
    if hasattr(original, "__aenter__"):
        body.update(__enter__=__enter__, __exit__=__exit__)
    if hasattr(original, "__aiter__"):
        body["__iter__"] = lambda self: _iterate(aiter(self._original))
    if hasattr(original, "__anext__"):
        body["__next__"] = _next
    for name, value in inspect.getmembers(original, inspect.isfunction):
        if not name.startswith("_"):
            body[name] = _method(value)
    made = type(original.__name__, (_Proxy,), body)
    _proxies[original] = made
    return made


Sandbox = _proxy(handle.Sandbox)
Files = _proxy(files.Files)
Conversation = _proxy(gateway.Conversation)
Models = _proxy(gateway.Models)
Networking = _proxy(network.Networking)
Images = _proxy(images.Images)
Store = _proxy(store.Store)
Processes = _proxy(processes.Processes)
Process = _proxy(processes.Process)
Terminals = _proxy(processes.Terminals)
Terminal = _proxy(processes.Terminal)
Services = _proxy(services.Services)
ServiceHandle = _proxy(services.ServiceHandle)
Sessions = _proxy(sessions.Sessions)
Session = _proxy(sessions.Session)
Ports = _proxy(ports.Ports)
Turn = _proxy(turns.Turn)
Run = _proxy(run.Run)
Reader = _proxy(asyncio.StreamReader)
Writer = _proxy(asyncio.StreamWriter)
Fork = _proxy(handle.Fork)
CommandStream = _proxy(handle.CommandStream)
Client = _proxy(client.Client)
