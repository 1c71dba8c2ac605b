// Ports on which something listens, what the sandbox may reach, and what it was refused.

import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { Network, PortLink } from "../api/schema";
import { attempt, mayAct, useLive } from "../state";
import { bytes, moment, visible } from "../text";
import { Copy } from "../ui/parts";

const MODES: [NonNullable<Network["mode"]>, string][] = [
  ["none", "none: its own loopback alone"],
  ["allow", "allow: what is listed"],
  ["open", "open: the public internet"],
];

function words(text: string): string[] {
  return text.split(/[\s,]+/).filter(Boolean);
}

function Policy({ id, network, onDone }: { id: string; network: Network; onDone: () => void }) {
  const mode = useSignal(network.mode ?? "none");
  const names = useSignal((network.names ?? []).join(" "));
  const cidrs = useSignal((network.cidrs ?? []).join(" "));
  const submit = async (event: Event): Promise<void> => {
    event.preventDefault();
    const wish: Network = { mode: mode.value };
    if (mode.value === "allow") wish.names = words(names.value);
    if (mode.value !== "none") wish.cidrs = words(cidrs.value);
    await attempt(() => api.setNetwork(id, wish), "The policy holds from now on.");
    onDone();
  };
  return (
    <form class="fields" onSubmit={(event) => void submit(event)}>
      <label>
        Policy
        <select value={mode} disabled={!mayAct.value} onChange={(event) => (mode.value = event.currentTarget.value as typeof mode.value)}>
          {MODES.map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      </label>
      {mode.value === "allow" && (
        <label>
          Names
          <input value={names} placeholder="pypi.org:443 *.example.org" onInput={(event) => (names.value = event.currentTarget.value)} />
        </label>
      )}
      {mode.value !== "none" && (
        <label>
          Networks
          <input value={cidrs} placeholder="10.0.0.0/8:tcp/80" onInput={(event) => (cidrs.value = event.currentTarget.value)} />
        </label>
      )}
      {mayAct.value && <button type="submit">Apply</button>}
    </form>
  );
}

const OWN = ["localhost", "127.0.0.1", "[::1]"]; // below `localhost`, every name leads to the browser's own machine

/** Where a port is, if this browser can reach it by a name. */
function addressOf(link: PortLink): string | null {
  if (link.domain) return `${location.protocol}//${link.name}.${link.domain}`;
  return OWN.includes(location.hostname) ? `${location.protocol}//${link.name}.localhost:${location.port}` : null;
}

function Port({ id, port }: { id: string; port: number }) {
  const forwarded = useSignal(false);
  const open = async (): Promise<void> => {
    const link = await attempt(() => api.portLink(id, port));
    const address = link ? addressOf(link) : null;
    if (link && address) window.open(address + link.path, "_blank", "noopener,noreferrer");
    else forwarded.value = true;
  };
  return (
    <div class="line" data-testid="port">
      {mayAct.value ? (
        <button class="link" role="link" title="open it in another tab" onClick={() => void open()}>
          {port}
        </button>
      ) : (
        <b>{port}</b>
      )}
      {(forwarded.value || !mayAct.value) && <Copy text={`pagurus port-forward ${id} ${port}`} />}
    </div>
  );
}

export function NetworkTab({ id }: { id: string }) {
  const ports = useLive(`${id}/ports`, (signal) => api.ports(id, { signal }), 3);
  const status = useLive(`${id}/network`, (signal) => api.network(id, { signal }), 3);
  const network = status.value.value;
  const counters = network?.counters;
  return (
    <div class="column">
      <h2>Ports</h2>
      {(ports.value.value ?? []).length === 0 && <p class="dim">Nothing listens.</p>}
      {(ports.value.value ?? []).map((port) => (
        <Port key={port} id={id} port={port} />
      ))}
      <h2>Network</h2>
      {network && <Policy key={JSON.stringify(network.network)} id={id} network={network.network ?? {}} onDone={status.refresh} />}
      {counters && (
        <p class="dim">
          {network.address ?? "no address"} · out {bytes(counters.bytes_out ?? 0)} · in {bytes(counters.bytes_in ?? 0)} ·{" "}
          {counters.packets_refused ?? 0} packets refused
        </p>
      )}
      <h2>Refused</h2>
      {(network?.refusals ?? []).length === 0 && <p class="dim">Nothing yet.</p>}
      <ul>
        {[...(network?.refusals ?? [])].reverse().map((item, number) => (
          <li key={number}>
            <b class="mono">{visible(item.what)}</b> {visible(item.why)} <span class="dim">{moment(item.at)}</span>
            {(item.count ?? 1) > 1 && ` × ${item.count}`}
          </li>
        ))}
      </ul>
    </div>
  );
}
