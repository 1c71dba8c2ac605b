"""The synchronous SDK: the asynchronous one, driven by one background event loop.

Owns: the bridge. Does not own: any method; every class here is a proxy made from its asynchronous
original, so the two cannot drift apart. Guarantee: coroutines become calls that block, asynchronous
iterators and context managers become plain ones, and objects of the SDK (and streams to a port) that
come back are wrapped again; everything else passes through as it is.

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
from typing import Any

from sandbox.sdk import client, files, gateway, handle, images, network, ports, processes, sessions, store, turns

__all__ = [
    "Client",
    "Conversation",
    "Files",
    "Fork",
    "Models",
    "Networking",
    "Ports",
    "Process",
    "Processes",
    "Running",
    "Sandbox",
    "Session",
    "Sessions",
    "Store",
    "Terminal",
    "Terminals",
    "Turn",
]


class _Loop:
    """One event loop in a thread of its own, shared by all proxies of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Run to its end and return what it returned. Not from the loop's own thread."""

        async def body() -> Any:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(body(), self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also on KeyboardInterrupt: nothing keeps running behind the caller
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="sandbox.sync", daemon=True).start()
            return self._loop


_loop = _Loop()
_proxies: dict[type, type] = {}


class _Proxy:
    """A synchronous view of `_original`."""

    _original: Any

    def __repr__(self) -> str:
        return repr(self._original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _wrapped(getattr(self._original, name))


def _wrapped(value: Any) -> Any:
    if type(value) in _proxies:
        proxy: Any = object.__new__(_proxies[type(value)])
        proxy._original = value
        return proxy
    if type(value) in (list, tuple):
        return type(value)(_wrapped(item) for item in value)
    if inspect.isawaitable(value):
        return _wrapped(_loop.run(value))
    if isinstance(value, AsyncIterator):
        return _iterate(value)
    if isinstance(value, AbstractAsyncContextManager):
        return _entered(value)
    return value


@contextlib.contextmanager
def _entered(manager: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
    """A context manager that is nobody's handle, such as a forwarded port."""
    entered = _loop.run(manager.__aenter__())
    try:
        yield _wrapped(entered)
    except BaseException as error:
        if not _loop.run(manager.__aexit__(type(error), error, error.__traceback__)):
            raise
    else:
        _loop.run(manager.__aexit__(None, None, None))


def _iterate(source: AsyncIterator[Any]) -> Iterator[Any]:
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


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
        async def made() -> Any:  # on the loop: what it makes may look for the running loop
            result = function(self._original, *args, **kwargs)
            return await result if inspect.iscoroutine(result) else result

        return _wrapped(_loop.run(made()))

    return call


def _proxy(original: type) -> type:
    """The synchronous class of an asynchronous one."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._original = original(*args, **kwargs)

    def __enter__(self: Any) -> Any:
        entered = _loop.run(self._original.__aenter__())
        return self if entered is self._original else _wrapped(entered)

    def __exit__(self: Any, *error: Any) -> None:
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


Sandbox: Any = _proxy(handle.Sandbox)
Files: Any = _proxy(files.Files)
Conversation: Any = _proxy(gateway.Conversation)
Models: Any = _proxy(gateway.Models)
Networking: Any = _proxy(network.Networking)
Images: Any = _proxy(images.Images)
Store: Any = _proxy(store.Store)
Processes: Any = _proxy(processes.Processes)
Process: Any = _proxy(processes.Process)
Terminals: Any = _proxy(processes.Terminals)
Terminal: Any = _proxy(processes.Terminal)
Sessions: Any = _proxy(sessions.Sessions)
Session: Any = _proxy(sessions.Session)
Ports: Any = _proxy(ports.Ports)
Turn: Any = _proxy(turns.Turn)
Reader: Any = _proxy(asyncio.StreamReader)
Writer: Any = _proxy(asyncio.StreamWriter)
Fork: Any = _proxy(handle.Fork)
Running: Any = _proxy(handle.Running)
Client: Any = _proxy(client.Client)
