// The host: what it has left, what its checkpoints did, and what it can do.

import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { DoctorFinding, HostUsage, Statistics } from "../api/schema";
import { attempt, isAdmin, seesOwn, seesTotals, useLive } from "../state";
import { bytes, ms, visible } from "../text";
import { Bar, Chip } from "../ui/parts";

function Room({ name, total, free }: { name: string; total: number; free: number }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <Bar value={total - free} limit={total} text={`${bytes(free)} free of ${bytes(total)}`} />
      </dd>
    </div>
  );
}

function Usage({ usage }: { usage: HostUsage }) {
  return (
    <dl class="uses">
      <div>
        <dt>load</dt>
        <dd>
          <Bar value={usage.load} limit={usage.cpus} text={`${usage.load.toFixed(2)} on ${usage.cpus} cores`} />
        </dd>
      </div>
      <Room name="memory" total={usage.memory_bytes} free={usage.memory_free} />
      <Room name="pool of file trees" total={usage.pool_bytes} free={usage.pool_free} />
      <Room name="disk" total={usage.disk_bytes} free={usage.disk_free} />
    </dl>
  );
}

function Counts({ counts }: { counts: Statistics }) {
  const rows: [string, string][] = [
    ["sandboxes", String(counts.sandboxes ?? 0)],
    ["turns", String(counts.turns ?? 0)],
    ["verdicts", Object.entries(counts.verdicts ?? {}).map(([name, count]) => `${name} ${count}`).join(", ")],
    ["checkpoints", Object.entries(counts.checkpoints ?? {}).map(([name, count]) => `${name} ${count}`).join(", ")],
    ["failed", String(counts.checkpoints_failed ?? 0)],
    ["in flight, queued", `${counts.in_flight ?? 0}, ${counts.queued ?? 0}`],
    ["stored", `${bytes(counts.stored_bytes ?? 0)} of ${bytes(counts.full_bytes ?? 0)}`],
    ["restores", String(counts.restores ?? 0)],
    ["commands waited", `${ms(counts.exposed_ms_p50 ?? 0)}, 99 %: ${ms(counts.exposed_ms_p99 ?? 0)}`],
  ];
  return (
    <dl>
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value || "–"}</dd>
        </div>
      ))}
    </dl>
  );
}

/** `ask`: for what a host can do, which it finds out by doing it. */
export function Doctor({ ask, children }: { ask: () => Promise<DoctorFinding[]>; children: string }) {
  const findings = useSignal<DoctorFinding[] | null>(null);
  const busy = useSignal(false);
  const examine = async (): Promise<void> => {
    busy.value = true;
    findings.value = (await attempt(ask)) ?? null;
    busy.value = false;
  };
  return (
    <>
      <button disabled={busy.value} onClick={() => void examine()}>
        {busy.value ? "Trying every capability…" : children}
      </button>
      {findings.value && (
        <table data-testid="findings">
          <tbody>
            {findings.value.map((item) => (
              <tr key={item.name}>
                <td>
                  <Chip kind={item.level}>{item.level}</Chip>
                </td>
                <td>{visible(item.name)}</td>
                <td>
                  {visible(item.fact)}
                  {item.hint && <div class="dim">{visible(item.hint)}</div>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}

export function HostView() {
  const counts = useLive("statistics", async (signal) => (seesOwn.value ? api.statistics({ signal }) : null), 3);
  const usage = useLive("usage/host", async (signal) => (seesTotals.value ? api.hostUsage({ signal }) : null), 3);
  return (
    <section>
      <h1>Host</h1>
      {usage.value.value && <Usage usage={usage.value.value} />}
      {counts.value.value && (
        <>
          <h2>Since the daemon started</h2>
          <Counts counts={counts.value.value} />
        </>
      )}
      {isAdmin.value && (
        <>
          <h2>Doctor</h2>
          <Doctor ask={api.doctor}>Examine this host</Doctor>
        </>
      )}
    </section>
  );
}
