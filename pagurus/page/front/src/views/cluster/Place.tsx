// On which host of a cluster a sandbox is, and the way to another one.

import * as api from "../../api/calls";
import { attempt, isAdmin, notify, useLive } from "../../state";
import { ms, visible } from "../../text";

export function Place({ id }: { id: string }) {
  const live = useLive(
    `${id}/place`,
    async (signal) => {
      const [places, hosts] = await Promise.all([api.places({ signal }), api.clusterHosts({ signal })]);
      return { here: places.find((item) => item.sandbox === id)?.host ?? "", hosts: hosts.map((item) => item.name) };
    },
    5,
  );
  const known = live.value.value;
  if (!known) return null;
  if (!isAdmin.value) return <span class="dim">on {visible(known.here)}</span>;
  const move = async (select: HTMLSelectElement): Promise<void> => {
    const moved = await attempt(() => api.move(id, select.value));
    if (moved) notify(`It runs on ${visible(moved.host)}; calls on it waited ${ms(moved.pause_ms)}.`);
    else select.value = known.here;
    live.refresh();
  };
  return (
    <label class="dim">
      on{" "}
      <select aria-label="Host" value={known.here} title="choose another host to move it there" onChange={(event) => void move(event.currentTarget)}>
        {known.hosts.map((name) => (
          <option key={name}>{name}</option>
        ))}
      </select>
    </label>
  );
}
