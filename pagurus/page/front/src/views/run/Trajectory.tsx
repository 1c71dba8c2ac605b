// One trajectory, turn by turn: what the model wrote and saw, its tokens, and its group.

import { useEffect } from "preact/hooks";
import { useSignal } from "@preact/signals";
import * as api from "../../api/calls";
import type { RunMember, RunPieces, RunStates, Trajectory } from "../../api/schema";
import { attempt, hasDaemon, link, login } from "../../state";
import { visible, visibleBlock } from "../../text";
import { Chip } from "../../ui/parts";
import { Branches } from "./Branches";
import { Tokens } from "./Tokens";
import { GoOn, Turn } from "./Turn";

interface Loaded {
  one: Trajectory;
  states: RunStates;
  pieces: RunPieces;
  group: RunMember[];
}

export async function loaded(prompt: string, member: string): Promise<Loaded> {
  const [one, states, pieces, group] = await Promise.all([
    api.runTrajectory(prompt, member),
    api.runStates(prompt, member),
    api.runPieces(prompt, member),
    api.runGroup(prompt),
  ]);
  return { one, states, pieces, group };
}

export function checkpointOf(states: RunStates, turn: number): string | undefined {
  return states.states?.find((item) => item.turn === turn)?.checkpoint;
}

/** The name of another trajectory, to be read beside this one. */
function Beside({ prompt, member, group }: { prompt: string; member: string; group: RunMember[] }) {
  const go = (event: SubmitEvent & { currentTarget: HTMLFormElement }): void => {
    event.preventDefault();
    const named = /^p?(\d+)\/(\d+)$/.exec(String(new FormData(event.currentTarget).get("other")).trim());
    if (named) location.hash = link("run", prompt, member, `p${named[1]!.padStart(6, "0")}`, named[2]!);
  };
  return (
    <form class="line" onSubmit={go}>
      <input name="other" list="others" aria-label="Another trajectory" placeholder="p12/4" required pattern="p?\d+/\d+" />
      <datalist id="others">
        {group.map((one) => (
          <option key={one.member} value={`${one.prompt}/${one.member}`} />
        ))}
      </datalist>
      <button type="submit">Side by side</button>
    </form>
  );
}

export function TrajectoryView({ prompt, member }: { prompt: string; member: string }) {
  const all = useSignal<Loaded | null>(null);
  useEffect(() => {
    void attempt(async () => (all.value = await loaded(prompt, member)));
  }, [prompt, member]);
  if (!all.value) return <p class="wait">…</p>;
  const { one, states, pieces, group } = all.value;
  const turns = one.turns ?? [];
  return (
    <section>
      <div class="bar-of-tools">
        <a href={link("run")}>All trajectories</a>
        <h1>
          {visible(prompt)}/{member}
        </h1>
        <Chip kind={one.status === "completed" ? "ok" : "failed"}>{one.status ?? "completed"}</Chip>
        <span>reward {one.reward ?? 0}</span>
        {one.reason && <span class="dim">{visible(one.reason)}</span>}
        {one.failure && <Chip kind="failed">{visible(one.failure.cause ?? "")}</Chip>}
        {hasDaemon.value && one.sandbox && <a href={link("s", one.sandbox, "tree")}>its checkpoints</a>}
        <span class="spacer" />
        <Beside prompt={prompt} member={member} group={group} />
      </div>
      <Branches members={group} here={member} />
      <Tokens one={one} pieces={pieces.pieces ?? []} reason={pieces.reason ?? ""} />
      <h2>Turns</h2>
      {states.reason && <p class="dim">No sandbox can go on from a turn: {visible(states.reason)}.</p>}
      {!states.reason && !hasDaemon.value && (
        <p class="dim">
          To go on from a turn: <code>pagurus rollouts shell {visible(login.value?.run ?? "RUN")} {visible(prompt)}/{member} --turn N</code>
        </p>
      )}
      {one.opening && <pre class="said user">{visibleBlock(one.opening)}</pre>}
      {turns.map((turn) => (
        <Turn key={turn.index} turn={turn} checkpoint={checkpointOf(states, turn.index)} />
      ))}
      <div class="line">
        <b>the end</b>
        <GoOn checkpoint={checkpointOf(states, turns.length)} what="at its end" />
      </div>
    </section>
  );
}
