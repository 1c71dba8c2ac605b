"""What a cluster shows of itself: hosts, where sandboxes are, copies of them, jobs, turns on shared machines, builds.

Guarantee: a token that has an owner sees what belongs to this owner, and of each host its name, its state, its labels
and how many of the owner's sandboxes are there. What a host has and does counts all owners: that takes `monitor`.
"""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from coordinator.callers import Callers
from coordinator.forward import HostResponse, passed_on
from coordinator.jobs.keeper import Jobs
from coordinator.members import HostMember, Members
from coordinator.phases import PhaseScheduler
from coordinator.wire import raw, reply
from daemon.auth.access import CALLER, GRANTED, Caller, Scope
from daemon.auth.visibility import visible
from sandbox.errors import Invalid, NotFound
from sandbox.messages.cluster import CopyInfo, HostInfo, JobInfo, PastPhase, PhaseInfo, PlaceInfo

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOSTS = "/v1/cluster/hosts"
_SHOWN = (HOSTS, *(f"/v1/cluster/{name}" for name in ("places", "copies", "jobs", "phases")))


def scope(caller: Caller, method: str, path: str) -> Scope:
    """What a token needs for a route of the cluster's own.

    >>> scope(Caller(), "GET", "/v1/cluster/jobs/j-1/log"), scope(Caller(), "DELETE", "/v1/cluster/jobs/j-1")
    ('read', 'admin')
    """
    if method != "GET" or path.startswith(f"{HOSTS}/"):
        return "admin"
    if path == HOSTS and caller.scope == "monitor":
        return "monitor"
    return "read" if path.startswith(_SHOWN) else "admin"


class Overview:
    """See the module."""

    def __init__(self, members: Members, callers: Callers, jobs: Jobs, phases: PhaseScheduler) -> None:
        self._members, self._callers = members, callers
        self._jobs, self._phases = jobs, phases

    def table(self) -> Iterable[tuple[str, str, Handler]]:
        yield from (
            ("GET", HOSTS, self._hosts),
            ("GET", f"{HOSTS}/{{name}}/doctor", self._doctor),
            ("GET", "/v1/cluster/places", self._places),
            ("GET", "/v1/cluster/copies", self._copies),
            ("GET", "/v1/cluster/phases", self._now),
            ("GET", "/v1/cluster/phases/past", self._past),
            ("GET", "/v1/cluster/jobs", self._all_jobs),
            ("GET", "/v1/cluster/jobs/{job}", self._one_job),
            ("GET", "/v1/cluster/jobs/{job}/log", self._log),
            ("POST", "/v1/builds/{build}", self._build),
            ("GET", "/v1/builds/{build}/log", self._build),
        )

    # ----------------------------------------------------------------- hosts

    async def _hosts(self, request: web.Request) -> web.StreamResponse:
        """Hosts, as much as the caller may see of them."""
        infos = self._members.infos()
        if "monitor" in GRANTED[CALLER.get().scope]:
            return reply(request, infos)
        own = collections.Counter(item.host for item in self._members.places.values() if visible(item.row.owner))
        shown = [
            HostInfo(name=item.name, address="", state=item.state, labels=item.labels, sandboxes=own[item.name])
            for item in infos
        ]
        return reply(request, shown)

    async def _doctor(self, request: web.Request) -> web.StreamResponse:
        """What this host can do, found out by its daemon."""
        member = self._members.member(request.match_info["name"])
        return (await self._answer(request, member, "/v1/doctor")).response()

    async def _places(self, request: web.Request) -> web.StreamResponse:
        """Where the caller's sandboxes are."""
        result = sorted(self._members.places.items())
        return reply(request, [PlaceInfo(sandbox=id, host=item.host) for id, item in result if visible(item.row.owner)])

    async def _copies(self, request: web.Request) -> web.StreamResponse:
        """Hosts that hold copies of the states of the caller's sandboxes."""
        places = self._members.places
        result = [
            CopyInfo(sandbox=id, checkpoint=row.checkpoint, host=row.host)
            for id, rows in sorted(self._members.state.copies.items())
            if CALLER.get().everything or (id in places and visible(places[id].row.owner))
            for row in rows.values()
        ]
        return reply(request, result)

    # ----------------------------------------------------------------- jobs

    async def _all_jobs(self, request: web.Request) -> web.StreamResponse:
        """The caller's jobs."""
        return reply(request, [item for item in await self._jobs.all() if visible(item.owner)])

    async def _one_job(self, request: web.Request) -> web.StreamResponse:
        """One job."""
        return reply(request, await self._job(request.match_info["job"]))

    async def _job(self, name: str) -> JobInfo:
        """Raises NotFound for another owner's, as for one that there is not."""
        result = await self._jobs.job(name)
        if not visible(result.owner):
            raise NotFound(f"no such job: {name}", hint="list those there are with `pagurus jobs`")
        return result

    async def _log(self, request: web.Request) -> web.StreamResponse:
        """What a job has written, from byte `from` on."""
        begin = request.query.get("from", "0")
        if not begin.isascii() or not begin.isdigit():
            raise Invalid(f"from={begin} is no position", hint="give the number of bytes that were read")
        job = await self._job(request.match_info["job"])
        return web.Response(body=await self._jobs.said(job.id, int(begin[:18])))

    async def _now(self, request: web.Request) -> web.StreamResponse:
        """Turns on shared machines now."""
        return reply(request, _own(await self._phases.all()))

    async def _past(self, request: web.Request) -> web.StreamResponse:
        """Turns on shared machines that are over."""
        return reply(request, _own(await self._phases.past()))

    # ----------------------------------------------------------------- builds

    async def _build(self, request: web.Request) -> web.StreamResponse:
        """To the host that keeps the log of this build."""
        answer: HostResponse | None = None
        for member in self._members.living():
            answer = await self._answer(request, member, request.path_qs)
            if answer.status != NotFound.status:
                break
        if answer is None:
            raise NotFound("no host answers", hint="see `pagurus cluster ls`")
        return answer.response()

    async def _answer(self, request: web.Request, member: HostMember, path: str) -> HostResponse:
        headers = passed_on(request.headers)
        headers.pop("Content-Length", None)
        token, data = await self._callers.token(member), await raw(request) or None
        return await member.upstream.complete(request.method, path, headers, data, token)


def _own(phases: list[PhaseInfo] | list[PastPhase]) -> list[PhaseInfo | PastPhase]:
    """Those of jobs of the caller's owner: their names begin with it."""
    caller = CALLER.get()
    return [item for item in phases if caller.everything or item.job.startswith(f"{caller.owner}:")]
