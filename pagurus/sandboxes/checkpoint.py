"""``pagurus checkpoint``: capture a sandbox, and everything about checkpoints that lie in the store.

``pagurus checkpoint SANDBOX [LABEL]`` captures, as ``pagurus checkpoint take`` does; every other verb has its name.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from typer.core import TyperGroup

from pagurus import output
from pagurus.common import CheckpointName, Json, SandboxName, call, checkpoint_ids, item, sandbox_names
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import CheckpointInfo
    from sandbox.messages.store import CheckpointReport, ImportResult

CHUNK = 1 << 20


class _TakeByDefault(TyperGroup):
    """What is no verb is a sandbox to capture."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        words = [word for word in args if not word.startswith("-")]
        if words and self.get_command(ctx, words[0]) is None:
            args = ["take", *args]
        return super().resolve_command(ctx, args)


application = typer.Typer(
    name="checkpoint",
    cls=_TakeByDefault,
    help="Capture a sandbox: checkpoint SANDBOX [LABEL]. The commands below work with existing checkpoints.",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)


@application.command()
def take(
    sandbox: SandboxName,
    text: Annotated[str | None, typer.Argument(help="The same as --label.", metavar="[LABEL]")] = None,
    label: Annotated[str | None, typer.Option("--label", "-l", help="What people call it.")] = None,
    durable: Annotated[bool, typer.Option("--durable", help="Wait until it survives the loss of power.")] = False,
    json: Json = False,
) -> None:
    """Capture the state of a sandbox as it is now."""
    if text is not None and label is not None:
        raise Invalid(f"two labels: {text!r} and {label!r}", hint="give one")

    async def work(host: Client) -> CheckpointInfo:
        return await (await host.get(sandbox)).checkpoint(label or text, wait="durable" if durable else "captured")

    info = call(work)
    if json:
        output.as_json(info)
    else:
        print(info.id)


@application.command("ls")
def list_(
    sandbox: Annotated[
        str | None, typer.Argument(help="Only of this sandbox.", metavar="[SANDBOX]", autocompletion=sandbox_names)
    ] = None,
    json: Json = False,
) -> None:
    """The checkpoints of the host, or of a sandbox. The oldest come first, those of a sandbox with their ancestors."""

    async def work(host: Client) -> list[CheckpointInfo]:
        return await (host.store.checkpoints() if sandbox is None else (await host.get(sandbox)).tree())

    infos = call(work)
    if json:
        output.as_json(infos)
        return
    output.table(
        ("checkpoint", "sandbox", "turn", "state", "verdict", "stored", "created", "label", "error"),
        [
            (
                *(i.id, i.sandbox, i.turn, i.state, i.verdict),
                *(output.size(i.stored_bytes), output.when(i.created_at), i.label, i.error),
            )
            for i in infos
        ],
    )


@application.command()
def verify(
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids; without any, all and the catalogue.", metavar="CHECKPOINT...", autocompletion=checkpoint_ids
        ),
    ] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Restore each separately, compare it, and end it before it runs.")
    ] = False,
    json: Json = False,
) -> None:
    """Hash pages, process images and files again. Exits with 1 when anything is damaged, and names it."""

    async def work(host: Client) -> list[CheckpointReport]:
        return await host.store.verify(*(checkpoints or []), restore=restore)

    with output.working("verify", quiet=json):
        reports = call(work)
    if json:
        output.as_json(reports)
    else:
        rows = [
            (r.checkpoint, "damaged" if r.damage else "complete", r.pages, r.files, "; ".join(r.notes)) for r in reports
        ]
        output.table(("checkpoint", "", "pages", "files", "notes"), rows)
        for report in reports:
            for line in report.damage:
                output.complain(f"{report.checkpoint}: {output.line(line)}")
    raise typer.Exit(1 if any(report.damage for report in reports) else 0)


@application.command()
def label(
    checkpoint: CheckpointName,
    text: Annotated[str | None, typer.Argument(help="The label; without it the label is taken away.")] = None,
) -> None:
    """Label a checkpoint. Labelled ones are kept by every policy that does not say otherwise."""
    call(lambda host: host.store.label(checkpoint, text))


@application.command()
def rm(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Ids.", metavar="CHECKPOINT...", autocompletion=checkpoint_ids)
    ],
) -> None:
    """Remove checkpoints that nothing is based on. What descends from them is handed to their parents."""
    item(checkpoints, lambda host, name: host.store.remove(name))


@application.command()
def collect() -> None:
    """Free what no policy keeps. Now instead of soon."""
    call(lambda host: host.store.collect())


@application.command()
def have() -> None:
    """Say what this host has. Written to stdout, for `export --have` on another one."""
    sys.stdout.buffer.write(call(lambda host: host.store.have()))
    sys.stdout.buffer.flush()


@application.command()
def export(
    checkpoint: CheckpointName,
    since: Annotated[str | None, typer.Option(help="A checkpoint that the other side has.")] = None,
    have_file: Annotated[
        Path | None, typer.Option("--have", help="What the other side has, by its `pagurus checkpoint have`.")
    ] = None,
) -> None:
    """Write a durable checkpoint to stdout. For `pagurus checkpoint import` elsewhere."""
    if sys.stdout.isatty():
        raise Invalid("a checkpoint is no text", hint="redirect it to a file or a pipe")
    existing = have_file.read_bytes() if have_file is not None else b""

    with output.progress(f"export {checkpoint}", None) as advanced:

        async def work(host: Client) -> None:
            import asyncio

            sent = 0
            async for part in host.store.stream(checkpoint, since=since, have=existing):
                await asyncio.to_thread(_write, part)
                sent += len(part)
                advanced(sent)

        call(work)


def _write(part: bytes) -> None:
    sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


Mounts = Annotated[bool, typer.Option("--mounts", help="Its forks may read the directories of this host it names.")]


@application.command("import")
def import_(
    file: Annotated[Path | None, typer.Argument(help="A file; stdin when left out.", exists=True)] = None,
    mounts: Mounts = False,
    json: Json = False,
) -> None:
    """Take in a checkpoint that was exported. From a host that you trust; all or nothing."""

    with output.progress("import", None if file is None else file.stat().st_size, quiet=json) as advanced:

        async def work(host: Client) -> ImportResult:
            if file is None:
                return await host.store.receive(_parts(sys.stdin.buffer, advanced), mounts=mounts)
            with open(file, "rb") as source:  # noqa: ASYNC230 - read on worker threads
                return await host.store.receive(_parts(source, advanced), mounts=mounts)

        imported = call(work)
    _deliver(imported, json)


@application.command()
def pull(
    address: Annotated[str, typer.Argument(help="URL or socket of the other daemon.")],
    checkpoint: CheckpointName,
    token: Annotated[str | None, typer.Option(envvar="PAGURUS_PULL_TOKEN", help="Its token.")] = None,
    ca: Annotated[str | None, typer.Option(help="Its certificate, or sha256:FINGERPRINT.")] = None,
    mounts: Mounts = False,
    json: Json = False,
) -> None:
    """Let the daemon fetch a checkpoint from another one. Only what is missing here is sent."""
    with output.working(f"pull {checkpoint}", quiet=json):
        imported = call(lambda host: host.store.pull(address, checkpoint, token=token, ca=ca, mounts=mounts))
    _deliver(imported, json)


async def _parts(source: BinaryIO, advanced: Callable[[int], None]) -> AsyncIterator[bytes]:
    import asyncio

    sent = 0
    while part := await asyncio.to_thread(source.read, CHUNK):
        yield part
        sent += len(part)
        advanced(sent)


def _deliver(imported: ImportResult, json: bool) -> None:
    if json:
        output.as_json(imported)
        return
    facts: Any = (
        "was here already"
        if imported.already
        else (
            f"{output.size(imported.received_bytes)} received, {imported.new_pages} of {imported.pages} pages and "
            f"{imported.new_contents} of {imported.contents} contents were new"
        )
    )
    print(output.line(f"{imported.checkpoint.id}: {facts}"))
