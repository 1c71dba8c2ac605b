// The grid of tasks × trajectories: which passed, which failed, and of those that did not end by themselves, whose doing
// that was.

import { useSignal } from "@preact/signals";
import type { RunGrid, RunRow } from "../../api/schema";
import { link } from "../../state";
import { visible } from "../../text";
import { Chip } from "../../ui/parts";

const MAX_PROMPTS = 500; // in the document, the newest
type Outcome = "pass" | "fail" | "policy" | "environment" | "platform";

const SIGNS: Record<Outcome, string> = { pass: "✓", fail: "✗", policy: "P", environment: "E", platform: "H" };
const TOLD: Record<Outcome, string> = {
  pass: "passed",
  fail: "failed",
  policy: "cut short by the policy itself",
  environment: "broken by the environment",
  platform: "lost by the platform",
};

function outcome(row: RunRow, enough: number): Outcome {
  if (row.blame) return row.blame as Outcome;
  return row.reward >= enough ? "pass" : "fail";
}

interface Scale {
  low: number;
  high: number;
}

/** The greener the better among all rewards; faint, so that what stands on it can be read. */
function tint(reward: number, { low, high }: Scale): string {
  const share = high > low ? (reward - low) / (high - low) : 0;
  return `color-mix(in srgb, var(--good) ${Math.round(share * 10)}%, var(--back))`;
}

function Cell({ row, enough, scale }: { row: RunRow; enough: number; scale: Scale }) {
  const result = outcome(row, enough);
  const said = `${visible(row.prompt)}/${row.member}: ${row.status}, reward ${row.reward}, ${TOLD[result]}`;
  return (
    <a
      class={`cell ${result}`}
      style={row.blame ? undefined : { background: tint(row.reward, scale) }}
      href={link("run", row.prompt, String(row.member))}
      title={row.cause ? `${said} (${visible(row.cause)})` : said}
      aria-label={said}
    >
      {SIGNS[result]}
    </a>
  );
}

function Row({ prompt, rows, reason, enough, scale }: {
  prompt: string;
  rows: RunRow[];
  reason: string | undefined;
  enough: number;
  scale: Scale;
}) {
  const passed = rows.filter((row) => outcome(row, enough) === "pass").length;
  return (
    <div class="line" role="group" aria-label={visible(prompt)}>
      <span class="mono prompt">{visible(prompt)}</span>
      <span class="number dim share">
        {rows.length > 0 && `${passed} of ${rows.length}`}
      </span>
      {rows.map((row) => (
        <Cell key={row.member} row={row} enough={enough} scale={scale} />
      ))}
      {reason !== undefined && <Chip kind="failed">given up: {visible(reason)}</Chip>}
    </div>
  );
}

export function Grid({ grid }: { grid: RunGrid }) {
  const enough = useSignal(1);
  const groups = new Map<string, RunRow[]>(Object.keys(grid.given_up).map((prompt) => [prompt, []]));
  for (const row of grid.rows) {
    const group = groups.get(row.prompt);
    if (group) group.push(row);
    else groups.set(row.prompt, [row]);
  }
  const newest = [...groups].sort(([one], [other]) => (one < other ? 1 : -1));
  const scale = grid.rows.reduce(
    ({ low, high }, row) => ({ low: Math.min(low, row.reward), high: Math.max(high, row.reward) }),
    { low: Infinity, high: -Infinity },
  );
  const counts = new Map<Outcome, number>();
  for (const row of grid.rows) counts.set(outcome(row, enough.value), (counts.get(outcome(row, enough.value)) ?? 0) + 1);
  return (
    <div class="grid-of-runs" data-testid="grid">
      <div class="line legend">
        {(Object.keys(SIGNS) as Outcome[]).map((item) => (
          <span key={item}>
            <i class={`cell ${item}`}>{SIGNS[item]}</i> {counts.get(item) ?? 0} {TOLD[item]}
          </span>
        ))}
        <label class="dim">
          passed with a reward of{" "}
          <input type="number" step="any" value={enough} onInput={(event) => (enough.value = Number(event.currentTarget.value))} />
        </label>
      </div>
      {newest.slice(0, MAX_PROMPTS).map(([prompt, rows]) => (
        <Row key={prompt} prompt={prompt} rows={rows} reason={grid.given_up[prompt]} enough={enough.value} scale={scale} />
      ))}
      {newest.length > MAX_PROMPTS && (
        <p class="dim">
          The newest {MAX_PROMPTS} prompts of {newest.length}.
        </p>
      )}
    </div>
  );
}
