// One row of the timeline: what the turn did, and what can be done with its checkpoint.

import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { CheckpointInfo, SandboxInfo } from "../api/schema";
import { attempt, isAdmin, link, mayAct, notify } from "../state";
import { bytes, moment, ms, visible } from "../text";
import type { TimelineRow } from "../tree/timeline";
import { later } from "../ui/later";
import { Act, Chip } from "../ui/parts";
import { save } from "../ui/save";

const Changes = later(() => import("./Changes").then((loaded) => loaded.Changes));

function Facts({ row }: { row: TimelineRow }) {
  const { checkpoint, turn } = row;
  const facts: [string, string][] = [];
  if (turn) {
    facts.push(["command", turn.command], ["exit code", String(turn.exit_code)], ["took", `${turn.duration.toFixed(2)} s`]);
    facts.push(["why", turn.reason]);
  }
  if (row.thinking !== null) facts.push(["the model thought", `${row.thinking.toFixed(1)} s`]);
  if (checkpoint) {
    facts.push(["id", checkpoint.id], ["state", checkpoint.state], ["taken", moment(checkpoint.created_at)]);
    facts.push(["frozen / total", `${ms(checkpoint.frozen_ms ?? 0)} / ${ms(checkpoint.total_ms ?? 0)}`]);
    facts.push(["stored", `${bytes(checkpoint.stored_bytes ?? 0)} of ${bytes(checkpoint.full_bytes ?? 0)}`]);
    if (checkpoint.error) facts.push(["error", checkpoint.error]);
    if (checkpoint.proved_at) facts.push(["compared equal", moment(checkpoint.proved_at)]);
    if (checkpoint.refuted) facts.push(["differed", checkpoint.refuted]);
  }
  return (
    <dl>
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class={name === "command" ? "mono" : ""}>{visible(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

function Actions({ info, checkpoint, onChange }: { info: SandboxInfo; checkpoint: CheckpointInfo; onChange: () => void }) {
  const verify = useSignal(false);
  const count = useSignal(1);
  const name = useSignal(checkpoint.label ?? "");
  const restore = async (): Promise<void> => {
    const result = await attempt(() => api.restore(info.id, checkpoint.id, verify.value));
    if (result) {
      const differences = result.differences ?? [];
      const compared = verify.value ? (differences.length ? `; it differs: ${differences[0]}` : ", and compared equal") : "";
      notify(`Restored in ${ms(result.total_ms)}${compared}.`, "", differences.length > 0);
    }
    onChange();
  };
  const fork = async (): Promise<void> => {
    const made = (await attempt(() => api.fork(checkpoint.id, count.value))) ?? [];
    for (const item of made) if (item.error) notify(item.error.message, item.error.hint ?? "", true);
    const first = made.find((item) => item.sandbox)?.sandbox;
    if (first) location.hash = made.length === 1 ? link("s", first.id) : link();
  };
  const rename = async (event: Event): Promise<void> => {
    event.preventDefault();
    await attempt(() => api.label(checkpoint.id, name.value || null), "Named.");
    onChange();
  };
  const take = (): void =>
    void attempt(async () => save(`${checkpoint.id}.pagurus`, await (await api.exportCheckpoint(checkpoint.id)).arrayBuffer()));
  const off = checkpoint.state === "pending" || checkpoint.state === "failed";
  return (
    <div class="actions">
      <div class="line">
        <Act off={off} onClick={() => void restore()} title="take this sandbox back to here, in place">
          Restore
        </Act>
        <label>
          <input type="checkbox" checked={verify} onChange={(event) => (verify.value = event.currentTarget.checked)} /> compare
        </label>
      </div>
      <div class="line">
        <Act off={off} onClick={() => void fork()} title="new sandboxes that continue from here">
          Fork
        </Act>
        <input
          type="number"
          aria-label="How many forks"
          min={1}
          max={1024}
          value={count}
          onInput={(event) => (count.value = Number(event.currentTarget.value) || 1)}
        />
      </div>
      {mayAct.value && (
        <form class="line" onSubmit={(event) => void rename(event)}>
          <button type="submit">Name</button>
          <input
            aria-label="Name of the checkpoint"
            placeholder="none"
            value={name}
            onInput={(event) => (name.value = event.currentTarget.value)}
          />
        </form>
      )}
      <div class="line">
        {isAdmin.value && (
          <button type="button" disabled={off} onClick={take}>
            Export
          </button>
        )}
        <Act danger onClick={() => void attempt(() => api.removeCheckpoint(checkpoint.id), "Removed.").then(onChange)}>
          Remove
        </Act>
      </div>
    </div>
  );
}

export function CheckpointPanel({ info, row, onChange, onClose }: {
  info: SandboxInfo;
  row: TimelineRow;
  onChange: () => void;
  onClose: () => void;
}) {
  const { checkpoint, turn } = row;
  return (
    <aside class="panel" aria-label="Checkpoint">
      <div class="line">
        <h2>{turn ? `Turn ${turn.turn}` : checkpoint?.label ? visible(checkpoint.label) : "Checkpoint"}</h2>
        {row.verdict && <Chip kind={row.verdict}>{row.verdict}</Chip>}
        <span class="spacer" />
        <button class="plain" aria-label="Close" onClick={onClose}>
          ×
        </button>
      </div>
      {checkpoint && <Actions info={info} checkpoint={checkpoint} onChange={onChange} />}
      {!checkpoint && <p class="dim">This turn changed nothing that a checkpoint would hold.</p>}
      <Facts row={row} />
      {checkpoint && <Changes info={info} checkpoint={checkpoint} />}
    </aside>
  );
}
