// The hosts of a cluster: which live, what they have left, what outlives them.

import * as api from "../../api/calls";
import type { HostInfo } from "../../api/schema";
import { attempt, isAdmin, seesOwn, seesTotals, useLive } from "../../state";
import { bytes, visible } from "../../text";
import { Bar, Chip } from "../../ui/parts";
import { Doctor } from "../Host";

function Row({ item, copies, onChange }: { item: HostInfo; copies: number; onChange: () => void }) {
  const draining = item.state === "draining";
  const memory = item.memory_bytes ?? 0;
  const used = memory - (item.memory_free ?? 0);
  return (
    <tr>
      <td>
        <b>{visible(item.name)}</b>{" "}
        {/^https?:/.test(item.address) ? (
          <a class="dim" href={item.address} rel="noreferrer" target="_blank">
            {visible(item.address)}
          </a>
        ) : (
          <span class="dim">{visible(item.address)}</span>
        )}
        {item.error && <div class="bad">{visible(item.error)}</div>}
      </td>
      <td>
        <Chip kind={item.state}>{item.state}</Chip>
        {typeof item.since_seen_s === "number" && <div class="dim">{item.since_seen_s.toFixed(1)} s ago</div>}
      </td>
      <td class="number">{item.sandboxes ?? 0}</td>
      <td class="number">{copies}</td>
      {seesTotals.value && (
        <>
          <td>
            <Bar value={item.load ?? 0} limit={item.cpus || null} text={`${(item.load ?? 0).toFixed(1)} of ${item.cpus ?? 0}`} />
          </td>
          <td>
            <Bar value={used} limit={memory || null} text={`${bytes(item.memory_free ?? 0)} free`} />
          </td>
          <td class="number wide">{bytes(item.disk_free ?? 0)}</td>
        </>
      )}
      <td class="wide">
        {Object.entries(item.labels ?? {}).map(([name, value]) => (
          <Chip key={name}>{visible(`${name}=${value}`)}</Chip>
        ))}
      </td>
      <td class="buttons">
        {isAdmin.value && (
          <button onClick={() => void attempt(() => api.drain(item.name, !draining)).then(onChange)}>{draining ? "Resume" : "Drain"}</button>
        )}
      </td>
    </tr>
  );
}

export function HostsView() {
  const live = useLive(
    "cluster/hosts",
    async (signal) => {
      const [hosts, copies] = await Promise.all([api.clusterHosts({ signal }), seesOwn.value ? api.copies({ signal }) : []]);
      return { hosts, copies };
    },
    3,
  );
  const counts = useLive("statistics", async (signal) => (isAdmin.value ? api.statistics({ signal }) : null), 5);
  const { hosts = [], copies = [] } = live.value.value ?? {};
  const held = (name: string): number => copies.filter((item) => item.host === name).length;
  const all = counts.value.value;
  return (
    <section>
      <h1>Hosts</h1>
      {live.error.value && <p class="bad">{visible(live.error.value)}</p>}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Name</th>
              <th title="a silent host's lease is over: its sandboxes stand still, or run elsewhere">Lease</th>
              <th>Sandboxes</th>
              <th title="states of other hosts' sandboxes that it holds">Copies</th>
              {seesTotals.value && (
                <>
                  <th>Load</th>
                  <th>Memory</th>
                  <th class="wide">Disk free</th>
                </>
              )}
              <th class="wide">Labels</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {hosts.map((item) => (
              <Row key={item.name} item={item} copies={held(item.name)} onChange={live.refresh} />
            ))}
          </tbody>
        </table>
      </div>
      {live.value.value && hosts.length === 0 && <p class="dim">No host is here. `pagurus cluster add NAME ADDRESS` adds one.</p>}
      {held("(store)") > 0 && <p class="dim">{held("(store)")} states lie in the store.</p>}
      {!seesTotals.value && <p class="dim">Sandboxes and copies are yours. What hosts have and do is for tokens of scope monitor or admin.</p>}
      {all && (
        <p class="dim">
          {all.sandboxes ?? 0} sandboxes on all living hosts, {all.turns ?? 0} turns, {all.restores ?? 0} restores, {bytes(all.stored_bytes ?? 0)} stored
        </p>
      )}
      {isAdmin.value && (
        <>
          <h2>Doctor</h2>
          {hosts.map((item) => (
            <Doctor key={item.name} ask={() => api.hostDoctor(item.name)}>
              {`Examine ${item.name}`}
            </Doctor>
          ))}
        </>
      )}
    </section>
  );
}
