// The sandboxes of the host, or of all hosts of a cluster, live.

import { useSignal, useComputed } from "@preact/signals";
import * as api from "../api/calls";
import type { SandboxInfo, SandboxUsage } from "../api/schema";
import { attempt, isCluster, link, mayAct, useLive } from "../state";
import { bytes, duration, parseBytes, visible } from "../text";
import { Bar, Chip, Rows } from "../ui/parts";
import { NewSandbox } from "./NewSandbox";

const HEIGHT = 44;
const INTERVAL = 2; // seconds
const USAGE_INTERVAL = 4; // seconds; the daemon reads the control groups for it

interface Seen {
  at: number; // ms
  cpu: number; // seconds of processor time so far
  share: number; // cores, since the time before
}

/** Cores in use, from two readings of a sandbox's processor time. */
function shares(before: Map<string, Seen>, usage: SandboxUsage[], now: number): Map<string, Seen> {
  const next = new Map<string, Seen>();
  for (const item of usage) {
    const last = before.get(item.sandbox);
    const cpu = item.cpu_seconds;
    const share = last && now > last.at ? Math.max(0, (cpu - last.cpu) / ((now - last.at) / 1000)) : 0;
    next.set(item.sandbox, { at: now, cpu, share });
  }
  return next;
}

function ends(info: SandboxInfo): string {
  return info.lifetime ? duration(info.created_at + info.lifetime - Date.now() / 1000) : "";
}

function fits(info: SandboxInfo, host: string, words: string[]): boolean {
  const labels = Object.entries(info.labels ?? {}).map(([name, value]) => `${name}=${value}`);
  const text = [info.id, info.name, info.image, info.state, info.owner, host && `host=${host}`, ...labels].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function cores(share: number, limit: number | null | undefined): string {
  return limit ? `${share.toFixed(2)} / ${limit}` : `${share.toFixed(2)} cores`;
}

function Row({ info, usage, seen, host }: {
  info: SandboxInfo;
  usage: SandboxUsage | undefined;
  seen: Seen | undefined;
  host: string;
}) {
  const memory = parseBytes(info.limits?.memory ?? "1GiB");
  return (
    <a class="row sandbox" href={link("s", info.id)}>
      <span class="name">
        <b>{visible(info.name ?? info.id)}</b> {info.name && <span class="dim">{info.id}</span>}
      </span>
      <span class="image">{visible(info.image)}</span>
      <span>
        <Chip kind={info.state}>{info.state}</Chip>
      </span>
      <span class="age" title="age">
        {duration(Date.now() / 1000 - info.created_at)}
      </span>
      <span class="ends" title="ends in">
        {ends(info)}
      </span>
      <span class="turn" title="turns">
        {info.turn ?? 0}
      </span>
      <span class="cpu">
        {usage && <Bar value={seen?.share ?? 0} limit={info.limits?.cpus ?? null} text={cores(seen?.share ?? 0, info.limits?.cpus)} />}
      </span>
      <span class="memory">
        {usage && <Bar value={usage.memory_bytes ?? 0} limit={memory} text={`${bytes(usage.memory_bytes)} / ${bytes(memory)}`} />}
      </span>
      <span class="labels">
        {host && <Chip kind="host">{visible(host)}</Chip>}
        {info.owner && <Chip>{visible(info.owner)}</Chip>}
        {Object.entries(info.labels ?? {}).map(([name, value]) => (
          <Chip key={name}>{visible(value ? `${name}=${value}` : name)}</Chip>
        ))}
      </span>
    </a>
  );
}

function Head() {
  const name = (kind: string, text: string) => <span class={kind}>{text}</span>;
  return (
    <div class="columns sandbox" aria-hidden="true">
      {name("name", "Name")}
      {name("image", "Image")}
      {name("state", "State")}
      {name("age", "Age")}
      {name("ends", "Ends in")}
      {name("turn", "Turns")}
      {name("cpu", "Processor")}
      {name("memory", "Memory")}
      {name("labels", isCluster.value ? "Host, owner, labels" : "Owner, labels")}
    </div>
  );
}

export function SandboxesView() {
  const live = useLive("sandboxes", (signal) => api.sandboxes({ signal }), INTERVAL);
  const seen = useSignal(new Map<string, Seen>());
  const used = useLive(
    "usage",
    async (signal) => {
      const usage = await api.usage({ signal });
      seen.value = shares(seen.value, usage, performance.now());
      return usage;
    },
    USAGE_INTERVAL,
  );
  const located = useLive("places", async (signal) => (isCluster.value ? api.places({ signal }) : []), USAGE_INTERVAL);
  const hosts = useComputed(() => new Map((located.value.value ?? []).map((item) => [item.sandbox, item.host])));
  const filter = useSignal("");
  const making = useSignal(false);
  const shown = useComputed(() => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = (live.value.value ?? []).filter((info) => fits(info, hosts.value.get(info.id) ?? "", words));
    return all.sort((one, other) => other.created_at - one.created_at);
  });
  const usage = useComputed(() => new Map((used.value.value ?? []).map((item) => [item.sandbox, item])));
  const total = live.value.value?.length;
  return (
    <section class="full">
      <div class="bar-of-tools">
        <h1>Sandboxes</h1>
        <span class="dim" data-testid="count">
          {total === undefined ? "…" : filter.value ? `${shown.value.length} of ${total}` : total}
        </span>
        <input
          type="search"
          placeholder="Filter: name, image, state, label=value"
          aria-label="Filter"
          value={filter}
          onInput={(event) => {
            filter.value = event.currentTarget.value;
          }}
        />
        <span class="spacer" />
        {mayAct.value && (
          <button
            onClick={() => {
              making.value = true;
            }}
          >
            New sandbox
          </button>
        )}
      </div>
      {live.error.value && <p class="bad">{visible(live.error.value)}</p>}
      <Rows
        items={shown.value}
        height={HEIGHT}
        label="Sandboxes"
        head={<Head />}
        row={(info) => (
          <Row
            key={info.id}
            info={info}
            usage={usage.value.get(info.id)}
            seen={seen.value.get(info.id)}
            host={hosts.value.get(info.id) ?? ""}
          />
        )}
      />
      {total === 0 && <p class="dim">No sandbox is here. “New sandbox” makes one, or `pagurus run debian`.</p>}
      {making.value && (
        <NewSandbox
          onClose={() => {
            making.value = false;
          }}
          onMade={(body) => attempt(() => api.create(body), "The sandbox runs.").then(live.refresh)}
        />
      )}
    </section>
  );
}
