// A run: what its steps measured, its trajectories as a grid, where its time went, and who waits.

import { useMemo } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../../api/calls";
import { link, login, useLive } from "../../state";
import { visible } from "../../text";
import { Chart } from "./Chart";
import { CompareView } from "./Compare";
import { Grid } from "./Grid";
import { TimeView } from "./Time";
import { TrajectoryView } from "./Trajectory";
import { WaitsView } from "./Waits";

const FIRST = ["reward", "reward_held_out", "entropy", "loss"];

/** The names of figures that are numbers in some step, the best known first. */
function names(steps: Record<string, unknown>[]): string[] {
  const all = new Set<string>();
  for (const step of steps) for (const [name, value] of Object.entries(step)) if (typeof value === "number") all.add(name);
  all.delete("step");
  const rank = (name: string): number => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return [...all].sort((one, other) => rank(one) - rank(other) || (one < other ? -1 : 1));
}

function Figures({ steps }: { steps: Record<string, unknown>[] }) {
  const all = useMemo(() => names(steps), [steps]);
  const shown = useSignal(FIRST);
  const x = useMemo(() => steps.map((step, index) => (typeof step.step === "number" ? step.step : index)), [steps]);
  const columns = useMemo(
    () => new Map(all.map((name) => [name, steps.map((step) => (typeof step[name] === "number" ? (step[name] as number) : null))])),
    [steps, all],
  );
  return (
    <>
      <div class="line">
        {all.map((name) => (
          <button
            key={name}
            aria-pressed={shown.value.includes(name)}
            class={shown.value.includes(name) ? "chosen" : "plain"}
            onClick={() => {
              const on = shown.value.includes(name);
              shown.value = on ? shown.value.filter((item) => item !== name) : [...shown.value, name];
            }}
          >
            {visible(name)}
          </button>
        ))}
      </div>
      <div class="charts">
        {all
          .filter((name) => shown.value.includes(name))
          .map((name) => (
            <Chart key={name} title={visible(name)} x={x} y={columns.get(name)!} />
          ))}
      </div>
    </>
  );
}

function Trajectories() {
  const grid = useLive("run/grid", (signal) => api.runGrid({ signal }), 5);
  return (
    <>
      <h2>Trajectories</h2>
      {grid.error.value && <p class="dim">{visible(grid.error.value)}</p>}
      {grid.value.value && <Grid grid={grid.value.value} />}
    </>
  );
}

const TABS: [string, string][] = [
  ["", "Figures and trajectories"],
  ["time", "Where the time went"],
  ["waits", "Waits"],
];

/** `names`: of the address: nothing, a tab, a trajectory, or two of them. */
export function RunView({ names }: { names: string[] }) {
  const metrics = useLive("run/metrics", (signal) => api.runMetrics({ signal }), 5);
  const [tab = "", member = "", prompt = "", other = ""] = names;
  if (other) return <CompareView names={[tab, member, prompt, other]} />;
  if (member) return <TrajectoryView key={`${tab}/${member}`} prompt={tab} member={member} />;
  return (
    <section>
      <div class="bar-of-tools">
        <h1>{visible(login.value?.run ?? "")}</h1>
        <span class="dim">{metrics.value.value ? (metrics.value.value.summary ? "ended" : "runs") : "…"}</span>
      </div>
      <nav class="tabs" aria-label="Parts of the run">
        {TABS.map(([name, title]) => (
          <a key={name} href={link("run", ...(name ? [name] : []))} aria-current={name === tab ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {tab === "time" ? (
        <TimeView />
      ) : tab === "waits" ? (
        <WaitsView />
      ) : (
        <>
          {metrics.value.value && <Figures steps={metrics.value.value.steps} />}
          <Trajectories />
        </>
      )}
    </section>
  );
}
