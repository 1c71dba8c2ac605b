"""This daemon's nftables table in the kernel: made with its rules, changed in atomic batches of elements.

Guarantee: the changes of one :meth:`NftTable.apply` come into force together or not at all; the rules of a table that
is replaced come with their elements in one transaction, so no packet meets the rules without them. From Linux 6.9 on
the table is this process's own while it lives: ``nft flush ruleset`` passes it by, and no other program can change it.
It stays when the process ends, for the next to take. Everything here blocks.

The rules are written once, as text, by the ``nft`` program: pyroute2 has no words for verdict maps, stateful
expressions in sets, masquerading or rejecting. The elements, which change all the time, are netlink messages of our own
(a run of ``nft`` takes 10 ms and reads all sets; pyroute2's classes take one to write an element). So is the exchange:
pyroute2's has no time-out and waits for ever when the kernel refuses a batch as a whole.

A table belongs to a socket, and ``nft`` has one of its own. So an empty table that persists is made first, ``nft``
fills it, and the socket that writes the elements takes it. (Newer ``nft`` can make such a table, that of Debian 12
cannot.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

from daemon.network import present
from daemon.network.elements import BY_ADDRESS, INTERVALS, Element, ElementChange, statements
from daemon.network.ruleset import ruleset, version
from sandbox.errors import Unsupported

if TYPE_CHECKING:
    from pyroute2.netlink import nlmsg

NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE = 0x1, 0x4, 0x400
NLMSG_ERROR = 2
BATCH_BEGIN, BATCH_END = 0x10, 0x11
NEWTABLE, NEWSETELEM, DELSETELEM, DESTROYTABLE, DESTROYSETELEM = 0, 12, 14, 26, 30
TABLE_NAME, TABLE_FLAGS = 1, 2
SET_TABLE, SET_NAME, SET_ELEMENTS, LIST_ELEMENT = 1, 2, 3, 1
KEY, DATA, ELEMENT_TIMEOUT, KEY_END = 1, 2, 4, 10  # of an element
VALUE, VERDICT, VERDICT_CODE, VERDICT_CHAIN = 1, 2, 1, 2  # of its data
OWNER, PERSIST = 0x2, 0x4
SUBSYSTEM = 10  # nf_tables
INET = 1
GOTO = -4
PER_MESSAGE = 200  # elements; a netlink attribute holds 64 KiB
NFT_TIMEOUT = 300.0  # seconds for the program nft: its first call on a busy host loads modules of the kernel
TIMEOUT = 10.0  # seconds for the kernel's answer


def _kernel() -> tuple[int, int]:
    numbers = re.findall(r"\d+", platform.release())
    return int(numbers[0]), int(numbers[1])


# ------------------------------------------------------------------ the table


class NftTable:
    """One table in the kernel. For use by one thread at a time."""

    ownable = _kernel() >= (6, 9)  # a table with an owner can outlive it

    def __init__(self, name: str, prefix: str, group: int) -> None:
        self.name, self.prefix, self.group = name, prefix, group
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._sequence = 0
        self._remover = DESTROYSETELEM if _kernel() >= (6, 3) else DELSETELEM
        self._owned = False
        self._twin = f"{name}_next"

    # ------------------------------------------------------------------ its life

    def present(self) -> bool:
        """Whether there is a table by this name, of whatever version."""
        return _there(self.name)

    def ensure(self, elements: Sequence[Element] = ()) -> bool:
        """The table with today's rules. True when it had to be made: then with these elements."""
        if self._current():
            if self.ownable:
                self._own()
            return False
        if not self.ownable:
            nft("-f", "-", text=_emptied(self.name) + self._content(self.name, elements))
            return True
        self.close()  # what is ours alone `nft` cannot fill
        if elements and self.present():  # sandboxes keep sending: they are held to their policies by another table
            nft("-f", "-", text=_emptied(self._twin) + self._content(self._twin, elements))
        self._exchange([_of_table(DESTROYTABLE, self.name), _of_table(NEWTABLE, self.name, PERSIST)])
        nft("-f", "-", text=self._content(self.name, elements) + _gone(self._twin))
        self._own()
        return True

    def remove(self) -> None:
        """Idempotent."""
        if self.ownable:
            self._exchange([_of_table(DESTROYTABLE, item) for item in (self.name, self._twin)])
        else:
            nft("-f", "-", text=_gone(self.name))
        self.close()

    def _current(self) -> bool:
        return self.present() and present.has_set(self.name, version(self.name, self.prefix, self.group))

    def _content(self, name: str, elements: Sequence[Element]) -> str:
        return ruleset(name, self.prefix, self.group) + statements(name, elements)

    def _own(self) -> None:
        """From now on no other program removes or changes the table."""
        self._exchange(self._claim())
        self._owned = True

    def _claim(self) -> list[bytes]:
        """Messages that make the socket that sends them the owner. The second does nothing but fail, and the first with
        it, where the table has gone or is not of today: alone the first would make an empty one."""
        mine = version(self.name, self.prefix, self.group)
        names = _attribute(SET_TABLE, _text(self.name)) + _attribute(SET_NAME, _text(mine))
        return [_of_table(NEWTABLE, self.name, OWNER | PERSIST), _message(DELSETELEM, names)]

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
                self._owned = False

    # ------------------------------------------------------------------ elements

    def apply(self, changes: Sequence[ElementChange]) -> None:
        """All of them, or none. An element that is taken away need not be there any more."""
        if not changes:
            return
        try:
            self._batch(changes)
        except FileNotFoundError:
            # Before Linux 6.3 an element that has expired cannot be taken away without an error.
            for change in changes:
                if not change.add:
                    with contextlib.suppress(FileNotFoundError):
                        self._batch([change])
            self._batch([change for change in changes if change.add])

    def elements(self, target: Iterable[str], table: str = "") -> dict[str, list[tuple[bytes, Any]]]:
        """Keys of the elements of some sets, with the netlink message of each. A set that is not there has none."""
        from pyroute2.netlink.exceptions import NetlinkError
        from pyroute2.netlink.nfnetlink import nftsocket

        result: dict[str, list[tuple[bytes, Any]]] = {}
        with nftsocket.NFTSocket(nfgen_family=INET) as reader:
            for name in target:
                request = nftsocket.nft_set_elem_list_msg()
                request["attrs"] = [("NFTA_SET_ELEM_LIST_TABLE", table or self.name), ("NFTA_SET_ELEM_LIST_SET", name)]
                try:
                    result[name] = [
                        (bytes(element.get_nested("NFTA_SET_ELEM_KEY", "NFTA_DATA_VALUE")), element)
                        for answer in reader.request_get(request, nftsocket.NFT_MSG_GETSETELEM)
                        for element in answer.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS") or ()
                    ]
                except NetlinkError as error:  # a former daemon died before it had filled its table
                    if error.code != errno.ENOENT:
                        raise
                    result[name] = []
        return result

    def stored(self, target: Iterable[str] = (*BY_ADDRESS, "bound")) -> list[Element]:
        """What a former daemon put into the table."""
        table = self._twin if _there(self._twin) else self.name  # it died while the table was being replaced
        result = self.elements(target, table)
        return [_stored(name, key, message) for name, elements in result.items() for key, message in elements]

    def refusals(self) -> dict[IPv4Address, int]:
        """Packets refused, by the address of the sandbox."""
        counts = {}
        for key, element in self.elements(["refused"])["refused"]:
            state = element.get_attr("NFTA_SET_ELEM_EXPR") or element.get_attr("NFTA_SET_ELEM_EXPRESSIONS")
            first = state[0] if isinstance(state, list) else state
            data = first.get_attr("NFTA_EXPR_DATA") if first is not None else None
            counts[IPv4Address(key)] = int(data.get_attr("NFTA_COUNTER_PACKETS")) if data is not None else 0
        return counts

    # ------------------------------------------------------------------ the exchange

    def _batch(self, changes: Sequence[ElementChange]) -> None:
        claim = self._claim() if self.ownable and not self._owned else []
        self._exchange([*claim, *self._messages(changes)])
        self._owned = self.ownable

    def _exchange(self, messages: Iterable[bytes]) -> None:
        with self._lock:
            first = self._next()
            parts = [_edge(BATCH_BEGIN, first)]
            waiting = set()
            for message in messages:
                number = self._next()
                waiting.add(number)
                parts.append(message[:8] + struct.pack("=I", number) + message[12:])
            parts.append(_edge(BATCH_END, self._next()))
            connection = self._connection()
            connection.send(b"".join(parts))
            self._answers(connection, waiting, first)

    def _messages(self, changes: Sequence[ElementChange]) -> Iterator[bytes]:
        groups: list[tuple[tuple[bool, str], list[Element]]] = []
        for change in changes:
            kind = (change.add, change.element.set)
            if not groups or groups[-1][0] != kind or len(groups[-1][1]) == PER_MESSAGE:
                groups.append((kind, []))
            groups[-1][1].append(change.element)
        for (add, name), elements in groups:
            listed = b"".join(_attribute(LIST_ELEMENT, _encoded(element, add=add)) for element in elements)
            names = _attribute(SET_TABLE, _text(self.name)) + _attribute(SET_NAME, _text(name))
            flags = NLM_F_CREATE if add else 0
            yield _message(NEWSETELEM if add else self._remover, names + _attribute(SET_ELEMENTS, listed), flags)

    def _answers(self, connection: socket.socket, waiting: set[int], first: int) -> None:
        """Those to one batch. What is said late of an earlier one has other numbers: the socket, which the table
        belongs to, is kept whatever fails."""
        failed = 0
        while waiting:
            try:
                data = connection.recv(1 << 20)
            except TimeoutError:
                raise Unsupported(
                    f"nf_tables gave no answer within {TIMEOUT:g} s",
                    hint="try again while the host does less; see `dmesg`",
                ) from None
            while len(data) >= 16:
                length, kind, _, number, _ = struct.unpack_from("=IHHII", data)
                if kind == NLMSG_ERROR and (number in waiting or number == first):
                    (code,) = struct.unpack_from("=i", data, 16)
                    failed = failed or -code
                    if number == first and code:  # the batch as a whole was refused
                        waiting.clear()
                    waiting.discard(number)
                data = data[max(16, length + 3 & ~3) :]
        if failed:
            raise OSError(failed, f"nf_tables: {os.strerror(failed)}")

    def _connection(self) -> socket.socket:
        if self._socket is None:
            made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 12)  # NETLINK_NETFILTER
            made.settimeout(TIMEOUT)
            made.setsockopt(socket.SOL_SOCKET, 32, 8 << 20)  # SO_SNDBUFFORCE: a batch is one message
            made.bind((0, 0))
            self._socket = made
        return self._socket

    def _next(self) -> int:
        self._sequence = self._sequence + 1 & 0x7FFFFFFF
        return self._sequence


def _edge(kind: int, number: int) -> bytes:
    """The begin or the end of a batch."""
    return struct.pack("=IHHIIBBH", 20, kind, NLM_F_REQUEST, number, 0, 0, 0, socket.htons(SUBSYSTEM))


def _message(kind: int, body: bytes, flags: int = 0) -> bytes:
    """Its number is filled in when it is sent."""
    flags |= NLM_F_REQUEST | NLM_F_ACK
    return struct.pack("=IHHIIBBH", 20 + len(body), SUBSYSTEM << 8 | kind, flags, 0, 0, INET, 0, 0) + body


def _of_table(kind: int, table: str, flags: int | None = None) -> bytes:
    name = _attribute(TABLE_NAME, _text(table))
    body = name if flags is None else name + _attribute(TABLE_FLAGS, struct.pack("!I", flags))
    return _message(kind, body, NLM_F_CREATE if kind == NEWTABLE else 0)


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def _text(word: str) -> bytes:
    return word.encode() + b"\0"


def _encoded(element: Element, *, add: bool) -> bytes:
    parts = [_attribute(KEY, _attribute(VALUE, element.key))]
    if add and element.chain:
        code = _attribute(VERDICT_CODE, struct.pack("!i", GOTO))
        verdict = code + _attribute(VERDICT_CHAIN, _text(element.chain))
        parts.append(_attribute(DATA, _attribute(VERDICT, verdict)))
    if add and element.mark:
        parts.append(_attribute(DATA, _attribute(VALUE, struct.pack("=I", element.mark))))
    if add and element.seconds:
        parts.append(_attribute(ELEMENT_TIMEOUT, struct.pack("!Q", 1000 * element.seconds)))
    if element.end:
        parts.append(_attribute(KEY_END, _attribute(VALUE, element.end)))
    return b"".join(parts)


def _stored(name: str, key: bytes, message: nlmsg) -> Element:
    """An element as it was read; of a map with its value."""
    end = message.get_nested("NFTA_SET_ELEM_KEY_END", "NFTA_DATA_VALUE")
    value = message.get_nested("NFTA_SET_ELEM_DATA", "NFTA_DATA_VALUE")
    chain = message.get_nested("NFTA_SET_ELEM_DATA", "NFTA_DATA_VERDICT", "NFTA_VERDICT_CHAIN")
    mark = struct.unpack("=I", value)[0] if name == "generations" and value else 0
    left = message.get_attr("NFTA_SET_ELEM_EXPIRATION")  # milliseconds
    if name in INTERVALS:
        end = end or key  # a single one may come without it
    return Element(name, key, bytes(end or b""), chain or "", mark, 0 if left is None else 1 + int(left) // 1000)


def _there(table: str) -> bool:
    return ("inet", table) in present.tables()


def _gone(table: str) -> str:
    """In nft's language: takes a table away, whether or not it is there. One that persists it would not take."""
    return f"table inet {table}\ndelete table inet {table}\n"


def _emptied(table: str) -> str:
    return f"{_gone(table)}table inet {table}\n"


def nft(*arguments: str, text: str | None = None) -> str:
    """What the program says. Raises Unsupported where it is missing, refuses, dies or does not end."""
    program = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if program is None:
        raise Unsupported("the program nft is missing", hint="install the package nftables")
    command = [program, *arguments]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=NFT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unsupported(
            f"nft did not end within {NFT_TIMEOUT:g} s", hint="try again when the host is idle"
        ) from error
    if done.returncode < 0:
        others = ", ".join(f"{family} {name}" for family, name in present.tables() if "pagurus" not in name)
        raise Unsupported(
            f"the program nft died of {signal.Signals(-done.returncode).name} (tables of others: {others or 'none'})",
            hint="a newer nft made one of them with what this one does not know: install that nft here, or remove it",
        )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Unsupported(f"nft: {said[0] if said else done.returncode}", hint="see `pagurus doctor`")
    return done.stdout
