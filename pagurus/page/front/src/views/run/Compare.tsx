// Two trajectories side by side, turn by turn.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import type { RunStates, Trajectory, TurnRecord } from "../../api/schema";
import { attempt, link } from "../../state";
import { visible, visibleBlock } from "../../text";
import { Chip } from "../../ui/parts";
import { checkpointOf, loaded } from "./Trajectory";
import { Turn } from "./Turn";

type Pair = [{ one: Trajectory; states: RunStates }, { one: Trajectory; states: RunStates }];

function same(one: TurnRecord | undefined, other: TurnRecord | undefined): boolean {
  return one !== undefined && one.action === other?.action && one.observation === other?.observation;
}

/** How many turns both began with. */
function together(one: Trajectory, other: Trajectory): number {
  const turns = one.turns ?? [];
  const different = turns.findIndex((turn, index) => !same(turn, other.turns?.[index]));
  return different < 0 ? turns.length : different;
}

function Head({ one }: { one: Trajectory }) {
  return (
    <div class="line">
      <h2>
        <a href={link("run", one.prompt ?? "", String(one.index ?? 0))}>
          {visible(one.prompt ?? "")}/{one.index ?? 0}
        </a>
      </h2>
      <Chip kind={one.status === "completed" ? "ok" : "failed"}>{one.status ?? "completed"}</Chip>
      <span>reward {one.reward ?? 0}</span>
      <span class="dim">
        {(one.turns ?? []).length} turns, {(one.tokens ?? []).length} tokens
      </span>
    </div>
  );
}

export function CompareView({ names }: { names: [string, string, string, string] }) {
  const pair = useSignal<Pair | null>(null);
  useEffect(() => {
    void attempt(async () => (pair.value = await Promise.all([loaded(names[0], names[1]), loaded(names[2], names[3])])));
  }, [names.join("/")]);
  if (!pair.value) return <p class="wait">…</p>;
  const [left, right] = pair.value;
  const shared = together(left.one, right.one);
  const most = Math.max((left.one.turns ?? []).length, (right.one.turns ?? []).length);
  const rows = [...Array(most).keys()];
  const side = (at: Pair[number], index: number) => {
    const turn = at.one.turns?.[index];
    return turn ? <Turn turn={turn} checkpoint={checkpointOf(at.states, turn.index)} /> : <div class="dim">over</div>;
  };
  return (
    <section>
      <div class="bar-of-tools">
        <a href={link("run")}>All trajectories</a>
        <h1>Side by side</h1>
        <span class="dim" data-testid="together">
          {shared > 0 ? `the first ${shared} turns are equal` : "they differ from the first turn on"}
        </span>
      </div>
      <div class="pair">
        <Head one={left.one} />
        <Head one={right.one} />
        {left.one.opening !== right.one.opening &&
          [left, right].map((at, number) => (
            <pre key={number} class="said user">
              {visibleBlock(at.one.opening ?? "")}
            </pre>
          ))}
        {rows.slice(shared).flatMap((index) => [
          <div key={`l${index}`}>{side(left, index)}</div>,
          <div key={`r${index}`}>{side(right, index)}</div>,
        ])}
      </div>
      {shared > 0 && (
        <details>
          <summary>The equal turns</summary>
          {rows.slice(0, shared).map((index) => (
            <div key={index}>{side(left, index)}</div>
          ))}
        </details>
      )}
    </section>
  );
}
