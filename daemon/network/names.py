"""DNS messages between a sandbox and the host's resolvers: questions, and what an answer may say.

Pure: no I/O, no clock. Guarantee: nothing of a foreign answer is passed on as it came. What goes to the sandbox is
written afresh and holds only the chain of aliases that begins at the requested name, and the addresses at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

MAX_QUESTION = 1024  # bytes
MAX_ALIASES = 12
MAX_ADDRESSES = 64
PLAIN_UDP, MODERN_UDP = 512, 1232  # bytes of an answer by UDP: without and with EDNS
MIN_TTL, MAX_TTL = 60, 3600  # seconds for which an answered address stays open


@dataclass(frozen=True)
class Question:
    """What a sandbox asks."""

    message: dns.message.Message
    name: str  # lower case, no final dot
    kind: int

    @property
    def addresses(self) -> bool:
        return self.kind == dns.rdatatype.A


@dataclass(frozen=True)
class ResolvedName:
    """What an answer says about a name."""

    aliases: tuple[tuple[str, str], ...] = ()  # from, to
    addresses: tuple[IPv4Address, ...] = ()
    ttl: int = 0
    missing: bool = False  # the name does not exist


def read_question(data: bytes) -> Question | None:
    """One ordinary question, or None for anything else."""
    if len(data) > MAX_QUESTION:
        return None
    try:
        message = dns.message.from_wire(data)
    except (dns.exception.DNSException, ValueError, IndexError):
        return None
    if message.flags & dns.flags.QR or message.opcode() != dns.opcode.QUERY or len(message.question) != 1:
        return None
    requested = message.question[0]
    if requested.rdclass != dns.rdataclass.IN:
        return None
    return Question(message, _text(requested.name), int(requested.rdtype))


def request(name: str) -> dns.message.Message:
    """The question that goes to the host's resolver: new, with an id of its own. Raises DNSException."""
    return dns.message.make_query(dns.name.from_text(name), dns.rdatatype.A, use_edns=0, payload=MODERN_UDP)


def read_answer(name: str, answer: dns.message.Message) -> ResolvedName:
    """The addresses of a name, by the aliases that lead to them; what does not belong to the chain is ignored."""
    if answer.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        raise ValueError(f"the resolver said {dns.rcode.to_text(answer.rcode())}")
    records = {
        (_text(item.name), int(item.rdtype)): item for item in answer.answer if item.rdclass == dns.rdataclass.IN
    }
    aliases: list[tuple[str, str]] = []
    ttls, here = [MAX_TTL], name
    while (alias := records.get((here, dns.rdatatype.CNAME))) is not None:
        target = _text(alias[0].target)
        if len(aliases) == MAX_ALIASES or target in {name, *(to for _, to in aliases)}:
            raise ValueError("its aliases lead in circles")
        aliases.append((here, target))
        ttls.append(alias.ttl)
        here = target
    result = records.get((here, dns.rdatatype.A))
    addresses = tuple(IPv4Address(item.address) for item in list(result or ())[:MAX_ADDRESSES])
    if result is not None:
        ttls.append(result.ttl)
    return ResolvedName(tuple(aliases), addresses, min(ttls), answer.rcode() == dns.rcode.NXDOMAIN and not addresses)


def answered(question: Question, result: ResolvedName) -> dns.message.Message:
    """The answer that the sandbox gets."""
    response = dns.message.make_response(question.message, recursion_available=True)
    if result.missing:
        response.set_rcode(dns.rcode.NXDOMAIN)
    for name, target in result.aliases:
        _add(response, name, result.ttl, dns.rdatatype.CNAME, f"{target}.")
    last = result.aliases[-1][1] if result.aliases else question.name
    if result.addresses:
        _add(response, last, result.ttl, dns.rdatatype.A, *map(str, result.addresses))
    return response


def nothing(question: Question, code: int = dns.rcode.NOERROR) -> dns.message.Message:
    """An answer without content: no record of that type, or an error."""
    response = dns.message.make_response(question.message, recursion_available=True)
    response.set_rcode(dns.rcode.Rcode(code))
    return response


def write(question: Question, response: dns.message.Message, *, stream: bool) -> bytes:
    """The answer as it travels. One that is too long for UDP makes the client use TCP."""
    limit = 65_535 if stream else PLAIN_UDP
    if not stream and question.message.edns >= 0:
        limit = max(PLAIN_UDP, min(MODERN_UDP, question.message.payload))
    try:
        return response.to_wire(max_size=limit)
    except dns.exception.TooBig:
        short = nothing(question)
        short.flags |= dns.flags.TC
        return short.to_wire(max_size=limit)


def open_seconds(ttl: int) -> int:
    """For how long an address stays open that was answered with this time to live."""
    return max(MIN_TTL, min(ttl, MAX_TTL)) + 10  # asker and kernel do not begin to count at the same time


def _add(response: dns.message.Message, name: str, ttl: int, kind: dns.rdatatype.RdataType, *values: str) -> None:
    owner = dns.name.from_text(name)
    response.answer.append(dns.rrset.from_text(owner, ttl, "IN", dns.rdatatype.to_text(kind), *values))


def _text(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True).lower()
