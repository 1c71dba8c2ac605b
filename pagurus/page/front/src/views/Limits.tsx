// What the sandbox may use and uses, and when it ends.

import { useSignal } from "@preact/signals";
import * as api from "../api/calls";
import type { SandboxInfo } from "../api/schema";
import { attempt, useLive } from "../state";
import { bytes, duration, moment, parseBytes, visible } from "../text";
import { Act, Bar } from "../ui/parts";

function Ending({ info }: { info: SandboxInfo }) {
  const minutes = useSignal(60);
  const end = info.lifetime ? info.created_at + info.lifetime : null;
  const set = (seconds: number | null): void => void attempt(() => api.setLifetime(info.id, seconds), "Its end is moved.");
  return (
    <>
      <p>
        {end ? `Ends ${moment(end)}, in ${duration(end - Date.now() / 1000)}: ${info.at_end ?? "stop"}.` : "It does not end by itself."}
        {info.idle_timeout ? ` Also after ${duration(info.idle_timeout)} without a call.` : ""}
      </p>
      <div class="line">
        <input
          type="number"
          min={1}
          aria-label="Minutes from now"
          value={minutes}
          onInput={(event) => (minutes.value = Number(event.currentTarget.value) || 1)}
        />
        <Act onClick={() => set(minutes.value * 60)}>End in so many minutes</Act>
        <Act onClick={() => set(null)}>Do not end</Act>
      </div>
    </>
  );
}

export function LimitsTab({ info }: { info: SandboxInfo }) {
  const live = useLive(`${info.id}/metrics`, (signal) => api.metrics(info.id, { signal }), 2);
  const used = live.value.value;
  const limits = info.limits ?? {};
  const disk = limits.disk === undefined ? "4GiB" : limits.disk;
  return (
    <div class="column">
      <h2>Use</h2>
      {live.error.value && <p class="dim">{visible(live.error.value)}</p>}
      {used && (
        <dl class="uses">
          <div>
            <dt>memory</dt>
            <dd>
              <Bar value={used.memory_bytes ?? 0} limit={used.memory_limit_bytes ?? null} text={`${bytes(used.memory_bytes)} of ${bytes(used.memory_limit_bytes)}`} />
            </dd>
          </div>
          <div>
            <dt>disk</dt>
            <dd>
              <Bar value={used.disk_bytes ?? 0} limit={parseBytes(disk)} text={`${bytes(used.disk_bytes)} of ${bytes(parseBytes(disk))}`} />
            </dd>
          </div>
          <div>
            <dt>processes</dt>
            <dd>
              <Bar value={used.processes} limit={limits.processes ?? 256} text={`${used.processes} of ${limits.processes ?? 256}`} />
            </dd>
          </div>
          <div>
            <dt>processor</dt>
            <dd>
              {used.cpu_seconds.toFixed(1)} s so far; {limits.cpus ? `${limits.cpus} cores` : "no limit"}
            </dd>
          </div>
          {(used.oom_kills ?? 0) > 0 && (
            <div>
              <dt>killed for memory</dt>
              <dd class="bad">{used.oom_kills} processes</dd>
            </div>
          )}
        </dl>
      )}
      <h2>End</h2>
      <Ending info={info} />
    </div>
  );
}
