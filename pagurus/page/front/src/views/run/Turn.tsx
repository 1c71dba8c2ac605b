// One turn of a trajectory, and the way to go on from the state before it.

import { attempt, hasDaemon, link, login } from "../../state";
import * as api from "../../api/calls";
import type { TurnRecord } from "../../api/schema";
import { ms, visible, visibleBlock } from "../../text";
import { Act, Chip } from "../../ui/parts";

async function goOn(checkpoint: string): Promise<void> {
  const labels = { run: `${login.value?.run ?? ""}+visit` }; // as `pagurus rollouts shell` does
  const made = await attempt(() => api.fork(checkpoint, 1, { labels, verify: true }));
  for (const item of made ?? []) if (item.error) await attempt(() => Promise.reject(new Error(item.error!.message)));
  const child = made?.find((item) => item.sandbox)?.sandbox;
  if (child) location.hash = link("s", child.id, "terminal");
}

/** Starts a sandbox in a state that the trajectory was in. */
export function GoOn({ checkpoint, what }: { checkpoint: string | undefined; what: string }) {
  if (checkpoint === undefined || !hasDaemon.value) return null;
  return (
    <Act onClick={() => void goOn(checkpoint)} title={`a new sandbox in the state ${what}`}>
      Go on from here
    </Act>
  );
}

export function Turn({ turn, checkpoint }: { turn: TurnRecord; checkpoint?: string | undefined }) {
  const executed = (turn.exec_end ?? 0) - (turn.exec_start ?? 0);
  const thought = (turn.gen_end ?? 0) - (turn.gen_start ?? 0);
  return (
    <article class="step" aria-label={`Turn ${turn.index}`}>
      <div class="line">
        <b>turn {turn.index}</b>
        <Chip kind={turn.verdict}>{turn.verdict ?? "none"}</Chip>
        {(turn.reward ?? 0) !== 0 && <Chip>reward {turn.reward}</Chip>}
        {(turn.restored ?? 0) > 0 && <Chip kind="replayed">restored × {turn.restored}</Chip>}
        {typeof turn.back_to === "number" && <Chip kind="replayed">back to before turn {turn.back_to}</Chip>}
        <span class="dim">
          thought {ms(thought * 1000)} · ran {ms(executed * 1000)} · {turn.tokens ?? 0} tokens · version {turn.version ?? -1}
          {turn.checkpoint && ` · frozen ${ms(turn.frozen_ms ?? 0)}`}
        </span>
        <span class="spacer" />
        <GoOn checkpoint={checkpoint} what={`before turn ${turn.index}`} />
      </div>
      <pre class="said assistant">{visibleBlock(turn.action ?? "")}</pre>
      <pre class="said user">{visibleBlock(turn.observation ?? "")}</pre>
      {(turn.effects ?? []).length > 0 && <div class="dim">{visible((turn.effects ?? []).join("; "))}</div>}
    </article>
  );
}
