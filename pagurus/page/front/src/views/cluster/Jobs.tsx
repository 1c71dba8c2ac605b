// The jobs of a cluster: which run, why the others wait, and what they print; machines that jobs take turns on.

import { useEffect, useMemo } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../../api/calls";
import type { JobInfo, PastPhase, RunTimes } from "../../api/schema";
import { attempt, complain, isAdmin, link, useLive } from "../../state";
import { duration, moment, visible, visibleBlock } from "../../text";
import { Chip } from "../../ui/parts";
import { Times } from "../run/Time";

const INTERVAL = 2; // seconds
const MAX_SHOWN = 200_000; // characters of a log
const SHOWN = 3600; // seconds of phases

function amounts(needs: Record<string, number> | undefined): string {
  return Object.entries(needs ?? {})
    .map(([name, count]) => `${name}=${count}`)
    .join(", ");
}

function needs(item: JobInfo): string {
  const parts = [amounts(item.needs)];
  if (item.trainer_needs) parts.push(`trainer ${amounts(item.trainer_needs)}`);
  if (item.engines) parts.push(`${item.engines} engines ${amounts(item.engine_needs)}`);
  return parts.join("; ");
}

/** What a job prints, as far as it is not too much, and what comes. */
function Log({ id }: { id: string }) {
  const text = useSignal("");
  useEffect(() => {
    const ending = new AbortController();
    const decoder = new TextDecoder();
    let from = 0;
    let timer = 0;
    const again = async (): Promise<void> => {
      try {
        const part = await api.jobLog(id, from, { signal: ending.signal });
        from += part.byteLength;
        text.value = (text.value + decoder.decode(part, { stream: true })).slice(-MAX_SHOWN);
        timer = window.setTimeout(again, part.byteLength ? 0 : INTERVAL * 1000);
      } catch (error) {
        complain(error);
      }
    };
    void again();
    return () => {
      ending.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return (
    <pre class="log" data-testid="log" tabIndex={0}>
      {visibleBlock(text.value) || <span class="dim">nothing yet</span>}
    </pre>
  );
}

function Row({ item, chosen, onChange }: { item: JobInfo; chosen: boolean; onChange: () => void }) {
  const over = ["done", "failed", "cancelled"].includes(item.state ?? "");
  const end = item.ended_at ?? Date.now() / 1000;
  return (
    <tr class={chosen ? "chosen" : ""}>
      <td>
        <a href={link("jobs", item.id)}>{item.id}</a> <span class="dim">{visible(item.run)}</span>
      </td>
      <td>
        <Chip kind={item.state ?? "queued"}>{item.state ?? "queued"}</Chip>
        {item.reason && <div class="dim">{visible(item.reason)}</div>}
      </td>
      <td class="wide">{visible(needs(item))}</td>
      <td class="wide">{visible(item.owner ?? "")}</td>
      <td class="number wide">{item.priority ?? 0}</td>
      <td class="wide">{moment(item.submitted_at)}</td>
      <td class="number">{item.started_at ? duration(end - item.started_at) : ""}</td>
      <td class="number">{typeof item.cost === "number" ? item.cost.toFixed(2) : ""}</td>
      <td class="buttons">
        {!over && isAdmin.value && (
          <button class="danger" onClick={() => void attempt(() => api.cancelJob(item.id), "Cancelled.").then(onChange)}>
            Cancel
          </button>
        )}
      </td>
    </tr>
  );
}

const KINDS = { rollout: "rollout machine", train: "training machine" };

/** Lanes of machines, coloured by the job that each worked for. */
function lanesOf(phases: PastPhase[], now: number): RunTimes {
  const since = Math.max(now - SHOWN, Math.min(now, ...phases.map((item) => item.begun ?? now)));
  const parts = new Map<string, Map<number, PastPhase[]>>();
  for (const item of phases) {
    if (typeof item.begun !== "number" || (item.ended ?? now) <= since) continue;
    const title = `Group ${item.group}: ${KINDS[item.kind]}s`;
    const machines = parts.get(title) ?? new Map<number, PastPhase[]>();
    parts.set(title, machines);
    for (const machine of item.machines) machines.set(machine, [...(machines.get(machine) ?? []), item]);
  }
  const part = ([title, machines]: [string, Map<number, PastPhase[]>]) => {
    const rows = [...machines].sort(([one], [other]) => one - other);
    const spent = new Map<string, number>();
    const lanes = rows.map(([machine, items]) => ({
      name: `machine ${machine}`,
      bars: items.map((item) => {
        const bar = { kind: item.job, begin: item.begun!, end: item.ended ?? now, who: `machine ${machine}, phase ${item.number}` };
        spent.set(item.job, (spent.get(item.job) ?? 0) + bar.end - Math.max(bar.begin, since));
        return bar;
      }),
    }));
    const all = Math.max(1e-9, (now - since) * rows.length);
    return { title, lanes, shares: [...spent].map(([kind, seconds]) => ({ kind, seconds, share: seconds / all })) };
  };
  return { since, until: now, parts: [...parts].map(part), colours: {}, left_out: 0 };
}

function Turns() {
  const live = useLive(
    "cluster/phases",
    async (signal) => {
      const [now, past] = await Promise.all([api.phases({ signal }), api.pastPhases({ signal })]);
      return { now, past };
    },
    INTERVAL,
  );
  const { now = [], past = [] } = live.value.value ?? {};
  const times = useMemo(() => lanesOf(past, Date.now() / 1000), [past]);
  if (now.length === 0) return null;
  return (
    <>
      <h2>Turns on shared machines</h2>
      <div class="scroll">
        <table data-testid="turns">
          <tbody>
            {now.map((item) => (
              <tr key={item.job}>
                <td>{visible(item.job)}</td>
                <td>
                  <Chip kind={item.state}>{item.state}</Chip> {item.kind} {item.number}
                </td>
                <td>{visible(item.reason ?? "")}</td>
                <td class="dim">{item.since ? duration(Date.now() / 1000 - item.since) : ""}</td>
                <td class="number wide">
                  {(item.rollout_hours ?? 0).toFixed(2)} h rollout, {(item.train_hours ?? 0).toFixed(2)} h training
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Times times={times} refresh={live.refresh} />
    </>
  );
}

export function JobsView({ id }: { id: string }) {
  const live = useLive("cluster/jobs", (signal) => api.jobs({ signal }), INTERVAL);
  const list = [...(live.value.value ?? [])].sort((one, other) => (other.submitted_at ?? 0) - (one.submitted_at ?? 0));
  return (
    <section>
      <h1>Jobs</h1>
      {live.error.value && <p class="dim">{visible(live.error.value)}</p>}
      <div class="scroll">
        <table>
          <thead>
            <tr>
              <th>Job</th>
              <th>State</th>
              <th class="wide">Needs</th>
              <th class="wide">Owner</th>
              <th class="wide">Priority</th>
              <th class="wide">Submitted</th>
              <th>Ran</th>
              <th>Cost</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {list.map((item) => (
              <Row key={item.id} item={item} chosen={item.id === id} onChange={live.refresh} />
            ))}
          </tbody>
        </table>
      </div>
      {live.value.value?.length === 0 && <p class="dim">No job is here. `pagurus submit RUN` adds one.</p>}
      {id && <Log key={id} id={id} />}
      <Turns />
    </section>
  );
}
