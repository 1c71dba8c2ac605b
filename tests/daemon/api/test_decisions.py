"""The API's decisions: who may, how much, what a repeated call gets, how a daemon is configured."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import math
import os
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import config
from daemon.api import idempotency, routes
from daemon.api.idempotency import CallRecord
from daemon.auth import access, quota, visibility
from daemon.auth.access import Caller, Grant
from daemon.auth.quota import Quota, QuotaUsage
from daemon.auth.tokens import TokenStore
from daemon.config import DaemonConfig
from sandbox.errors import Conflict, Forbidden, Interrupted, Invalid, Unauthorized
from sandbox.messages import ExecRequest, Limits

SCOPES = ("read", "exec", "admin")
SECRET = "s" * 43


def grant(**fields: object) -> Grant:
    existing: dict = {"id": "0" * 12, "name": "n", "scope": "exec", "owner": "team", "created_at": 0.0}
    return Grant(**{**existing, "secret": access.digest(SECRET), **fields})


# --------------------------------------------------------------------------- access


@pytest.mark.parametrize(
    ("scope", "needed", "refused"),
    [
        (scope, needed, needed not in granted)
        for scope, granted in {
            "open": "open",
            "monitor": "open monitor",
            "read": "open read",
            "exec": "open read exec",
            "admin": "open monitor read exec admin",
        }.items()
        for needed in ("open", "monitor", "read", "exec", "admin")
    ],
)
def test_what_a_scope_grants(scope: str, needed: str, refused: bool) -> None:
    error = access.refusal(Caller(scope=scope, everything=False), needed)  # type: ignore[arg-type]
    kind = None if not refused else Unauthorized if scope == "open" else Forbidden
    assert (None if error is None else type(error)) is kind


@pytest.mark.parametrize(
    ("fields", "secret", "now", "valid"),
    [
        ({}, SECRET, 1.0, True),
        ({}, SECRET[:-1] + "t", 1.0, False),
        ({}, "", 1.0, False),
        ({"expires_at": 10.0}, SECRET, 9.9, True),
        ({"expires_at": 10.0}, SECRET, 10.0, False),
        ({"revoked_at": 5.0}, SECRET, 1.0, False),
        ({"revoked_at": 5.0, "expires_at": 100.0}, SECRET, 50.0, False),
    ],
)
def test_a_token_is_valid_by_its_secret_its_time_and_until_revoked(
    fields: dict, secret: str, now: float, valid: bool
) -> None:
    if valid:
        caller = access.identify(secret, grant(**fields), now)
        assert (caller.owner, caller.scope, caller.everything) == ("team", "exec", False)
    else:
        with pytest.raises(Unauthorized):
            access.identify(secret, grant(**fields), now)


def test_no_such_token_sounds_like_a_wrong_one() -> None:
    with pytest.raises(Unauthorized) as unknown:
        access.identify(SECRET, None, 0.0)
    with pytest.raises(Unauthorized) as wrong:
        access.identify("x" * 43, grant(), 0.0)
    assert str(unknown.value) == str(wrong.value)


@given(owner=st.text(max_size=5), mine=st.text(max_size=5), scope=st.sampled_from(SCOPES))
def test_nobody_but_an_administrator_sees_what_is_anothers(owner: str, mine: str, scope: str) -> None:
    caller = Caller(token="t", owner=mine, scope=scope, everything=scope == "admin")  # type: ignore[arg-type]
    assert access.sees(caller, owner) == (scope == "admin" or (mine == owner != ""))


def test_what_an_administrator_makes_is_the_hosts_own() -> None:
    def owner(caller: Caller) -> str:
        access.CALLER.set(caller)
        assert visibility.is_own(visibility.caller_owner())
        return visibility.caller_owner()

    for everything, whose in ((True, ""), (False, "me")):
        caller = Caller(token="t", owner="me", scope="admin" if everything else "exec", everything=everything)
        assert contextvars.copy_context().run(owner, caller) == whose


@given(st.text(max_size=80))
def test_what_looks_like_no_token_is_none(text: str) -> None:
    assert access.split(text) is None


@given(
    number=st.text(alphabet="0123456789abcdef", min_size=12, max_size=12),
    secret=st.text(alphabet=string.ascii_letters + string.digits + "-_", min_size=43, max_size=43),
)
def test_a_token_is_split_into_its_parts(number: str, secret: str) -> None:
    assert access.split(f"pgr_{number}_{secret}") == (number, secret)
    assert access.split(f"pgr_{number}_{secret}\n") is None


@pytest.mark.parametrize(
    ("header", "token"),
    [(None, None), ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("", ""), ("Bearer", "")],
)
def test_the_token_of_a_header(header: str | None, token: str | None) -> None:
    assert access.bearer(header) == token


def test_tokens_that_change_at_the_same_time_are_all_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def slowly(handle: int) -> None:
        flush(handle)
        time.sleep(0.005)  # so that writers overlap where nothing keeps them apart

    monkeypatch.setattr(os, "fsync", slowly)
    file = tmp_path / "tokens.json"
    tokens = TokenStore(file, clock=lambda: 1.0)
    made = [tokens.create(name="n", scope="exec") for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        new = [pool.submit(tokens.create, name="m", scope="read") for _ in range(8)]
        gone = [pool.submit(tokens.revoke, grant.id) for grant, _ in made]
        made += [item.result() for item in new]
        assert all(item.result().revoked_at == 1.0 for item in gone)
    after = TokenStore(file, clock=lambda: 2.0)
    assert after.list() == tokens.list() and len(made) == len(after.list())
    for number, (_, text) in enumerate(made):
        if number >= 4:
            assert after.identify(text).scope == "read"
        else:
            with pytest.raises(Unauthorized):
                after.identify(text)


def test_a_revocation_that_was_not_written_is_written_when_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens.json"
    tokens = TokenStore(file, clock=lambda: 1.0)
    grant, text = tokens.create(name="n", scope="exec")
    with monkeypatch.context() as full, pytest.raises(OSError, match="full"):
        full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        tokens.revoke(grant.id)
    with pytest.raises(Unauthorized):
        tokens.identify(text)
    tokens.revoke(grant.id)
    with pytest.raises(Unauthorized):
        TokenStore(file, clock=lambda: 2.0).identify(text)


def test_only_the_hash_of_a_secret_is_kept() -> None:
    assert access.digest(SECRET) == hashlib.sha256(SECRET.encode()).hexdigest()


# --------------------------------------------------------------------------- bounds


def test_every_number_of_seconds_that_a_caller_says_is_bounded() -> None:
    """Bounds refuse NaN and infinity, which MessagePack can carry and no deadline understands."""
    target = {kind for route in routes() for kind in (route.body, route.query) if kind not in (None, bytes)}
    unbounded = [result for kind in target for result in _unbounded(msgspec.inspect.type_info(kind), kind.__name__)]
    assert unbounded == []
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(msgspec.ValidationError):
            raw = msgspec.msgpack.encode({"command": "true", "timeout": value})
            msgspec.msgpack.decode(raw, type=ExecRequest)


def _unbounded(kind: msgspec.inspect.Type, where: str) -> Iterator[str]:
    match kind:
        case msgspec.inspect.FloatType(le=limit, lt=below):
            if limit is None and below is None:
                yield where
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                yield from _unbounded(field.type, f"{where}.{field.name}")
        case msgspec.inspect.UnionType(types=types):
            for entry in types:
                yield from _unbounded(entry, where)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            yield from _unbounded(item, where)
        case msgspec.inspect.DictType(value_type=item):
            yield from _unbounded(item, where)


def test_the_output_that_a_command_keeps_is_bounded() -> None:
    for limit, fits in ((0, True), (16 << 20, True), ((16 << 20) + 1, False), (-1, False)):
        raw = msgspec.json.encode({"command": "true", "output_limit": limit})
        with contextlib.nullcontext() if fits else pytest.raises(msgspec.ValidationError, match="output_limit"):
            msgspec.json.decode(raw, type=ExecRequest)


# --------------------------------------------------------------------------- quota


LIMITS = st.builds(
    Limits,
    cpus=st.none() | st.floats(0.1, 64),
    memory=st.none() | st.integers(1, 1 << 40),
    disk=st.none() | st.integers(1, 1 << 40),
)


@given(st.lists(LIMITS, max_size=8))
def test_usage_adds_up_and_what_has_no_limit_is_infinite(limits: list[Limits]) -> None:
    used = quota.usage(limits)
    assert used.sandboxes == len(limits)
    for name in ("cpus", "memory", "disk"):
        values = [getattr(item, name) for item in limits]
        expected = math.inf if None in values else sum(values)
        assert getattr(used, name) == pytest.approx(expected)


@given(
    limit=st.builds(Quota, sandboxes=st.none() | st.integers(0, 9), memory=st.none() | st.integers(0, 1 << 41)),
    limits=st.lists(LIMITS, max_size=8),
)
def test_what_is_admitted_is_within_the_quota(limit: Quota, limits: list[Limits]) -> None:
    used = quota.usage(limits)
    within = (limit.sandboxes is None or used.sandboxes <= limit.sandboxes) and (
        limit.memory is None or used.memory <= limit.memory
    )
    assert (quota.excess(limit, used) == "") == within


def test_a_quota_names_what_is_exceeded() -> None:
    assert quota.excess(Quota(cpus=2), QuotaUsage(cpus=math.inf)) == "cpus: no limit of 2"
    assert quota.excess(Quota(sandboxes=1), QuotaUsage(sandboxes=2)) == "sandboxes: 2 of 1"


@given(
    rate=st.floats(0.1, 1000),
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=200),
)
def test_no_window_admits_more_than_the_burst_and_the_rate(rate: float, gaps: list[float]) -> None:
    bucket, now, admitted = None, 0.0, []
    for gap in gaps:
        now += gap
        bucket, wait = quota.take(bucket, rate, now)
        if wait == 0:
            admitted.append(now)
        else:
            assert wait <= 1 / rate + 1e-9
            _, again = quota.take(bucket, rate, now + wait + 1e-6)
            assert again == 0
    for first in range(len(admitted)):
        span = admitted[-1] - admitted[first]
        assert len(admitted) - first <= quota.burst(rate) + span * rate + 1e-6


# --------------------------------------------------------------------------- repeated calls


REQUESTED, OTHER = b"asked", b"other"


@pytest.mark.parametrize(
    ("retained", "repeat", "decision"),
    [
        (None, "once", "carry out"),
        (None, "again", "carry out"),
        (None, "redo", "carry out"),
        (CallRecord(REQUESTED, 200, "k", b"a"), "once", "replay"),
        (CallRecord(REQUESTED, 404, "k", b"a"), "again", "replay"),
        (CallRecord(REQUESTED, 0), "once", Conflict),
        (CallRecord(REQUESTED), "once", Interrupted),
        (CallRecord(REQUESTED), "again", "carry out"),
        (CallRecord(REQUESTED), "redo", "undo first"),
        (CallRecord(OTHER, 200, "k", b"a"), "once", Conflict),
        (CallRecord(OTHER), "redo", Conflict),
    ],
)
def test_what_a_repeated_call_gets(retained: CallRecord | None, repeat: str, decision: object) -> None:
    if isinstance(decision, str):
        assert idempotency.decide(retained, REQUESTED, repeat) == decision  # type: ignore[arg-type]
    else:
        with pytest.raises(decision):  # type: ignore[call-overload]
            idempotency.decide(retained, REQUESTED, repeat)  # type: ignore[arg-type]


@given(st.lists(st.text(max_size=4), min_size=4, max_size=4), st.lists(st.text(max_size=4), min_size=4, max_size=4))
def test_two_calls_share_a_key_only_when_all_parts_are_the_same(one: list[str], two: list[str]) -> None:
    for parts in (one, two):
        parts[3] = "k" + parts[3].encode().hex()
        parts[:3] = [part.replace("\0", "") for part in parts[:3]]  # neither tokens nor paths hold it
    assert (idempotency.identity(*one) == idempotency.identity(*two)) == (one == two)


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 201, "a\n"])
def test_a_key_has_a_sane_form(key: str) -> None:
    with pytest.raises(Invalid):
        idempotency.identity("", "POST", "/", key)


# --------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, ""),
        ({"listen": "0.0.0.0:8700"}, "without TLS"),
        ({"listen": "127.0.0.1:8700"}, "without TLS"),
        ({"listen": "127.0.0.1:8700", "plain": True}, ""),
        ({"listen": "[::1]:8700", "plain": True}, ""),
        ({"listen": "localhost:8700", "plain": True}, ""),
        ({"listen": "0.0.0.0:8700", "plain": True}, "loopback"),
        ({"listen": "host.example:8700", "plain": True}, "loopback"),
        ({"listen": "0.0.0.0:8700", "tls_self_signed": True}, ""),
        ({"listen": "0.0.0.0:8700", "tls_cert": Path("/c"), "tls_key": Path("/k")}, ""),
        ({"listen": "0.0.0.0:8700", "tls_cert": Path("/c")}, "key"),
        ({"tls_self_signed": True}, "without listen"),
        ({"listen": "0.0.0.0:8700", "tls_self_signed": True, "plain": True}, "exclude"),
        ({"listen": "8700", "tls_self_signed": True}, "address"),
        ({"listen": "host:port", "tls_self_signed": True}, "address"),
        ({"listen": "host:99999", "tls_self_signed": True}, "address"),
    ],
)
def test_what_fits_together(fields: dict, refused: str) -> None:
    if not refused:
        assert config.check(DaemonConfig(**fields)) == DaemonConfig(**fields)
    else:
        with pytest.raises(Invalid, match=refused):
            config.check(DaemonConfig(**fields))


def test_the_command_line_lies_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('listen = "127.0.0.1:1"\nplain = true\nconnections = 5\nlog_level = "debug"\n')
    result = config.parse(["--config", str(file), "--listen", "127.0.0.1:2"], {})
    assert (result.address, result.connections, result.log_level) == (("127.0.0.1", 2), 5, "debug")
    file.write_text('listn = "127.0.0.1:1"\n')
    with pytest.raises(Invalid, match="listn"):
        config.parse(["--config", str(file)], {})


def test_the_environment_stands_behind_file_and_options(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('state = "/from/file"\n')
    environment = {"PAGURUS_STATE": "/from/environment", "PAGURUS_RUN": "/run/other", "PAGURUS_KEEP_LAST": "20"}
    result = config.parse(["--config", str(file)], environment)
    assert (result.state, result.run, result.keep_last) == (Path("/from/file"), Path("/run/other"), 20)
    with pytest.raises(Invalid, match="keep_last"):
        config.parse([], {"PAGURUS_KEEP_LAST": "many"})
